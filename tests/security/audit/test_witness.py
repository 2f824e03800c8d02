"""The witness: what it refuses, and what it remembers."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax import errors
from nebula_jax.security import audit, private_files, store
from nebula_jax.security.audit import checkpoint_note, merkle, witness

KEY = ed25519.Ed25519PrivateKey.generate()


def verifier(lab, key=KEY, kind=checkpoint_note.LOG):
    return checkpoint_note.verifier(f"nebula/{lab}", kind, key).text


VERIFIER = verifier("lab-s")


def tree_of(size, name="entry"):
    tree = merkle.Tree()
    for number in range(size):
        tree.append(merkle.leaf(f"{name} {number}".encode()))
    return tree


def signed(tree, size, key=KEY, origin="nebula/lab-s"):
    checkpoint = checkpoint_note.Checkpoint(origin, size, tree.root(size))
    return checkpoint_note.sign(checkpoint, key).text


TREE, OTHER = tree_of(40), tree_of(40, "other")


@pytest.fixture
def peer(tmp_path):
    return witness.Witness(tmp_path, "lab-t")


def cosign(peer, size, old=None, **options):
    old = peer.size("lab-s") if old is None else old
    proof = TREE.consistency(old, size)
    return peer.cosign("lab-s", signed(TREE, size), proof, VERIFIER, **options)


def refused(peer, words, text, proof=(), own=VERIFIER, lab="lab-s"):
    """Asserts that a checkpoint is refused and nothing about it kept."""
    before = kept(peer)
    with pytest.raises(audit.AuditError, match=words) as why:
        peer.cosign(lab, text, proof, own)
    assert "\n" not in str(why.value)
    assert kept(peer) == before


def kept(peer):
    return (seen := peer.seen("lab-s")) and seen.note.text


def test_it_cosigns_what_continues(peer):
    assert peer.seen("lab-s") is None
    answers = [cosign(peer, size, seconds=7) for size in (0, 5, 5, 8, 33, 40)]
    assert len({answer.verifier for answer in answers}) == 1
    who = checkpoint_note.read_verifier(answers[0].verifier)
    assert (who.name, who.type) == ("nebula/lab-t/witness", checkpoint_note.WITNESS)
    for size, answer in zip((0, 5, 5, 8, 33, 40), answers, strict=True):
        note = checkpoint_note.read(f"{signed(TREE, size)}{answer.line}\n")
        assert checkpoint_note.is_signed(note, who)
        assert checkpoint_note.cosigned_at(note.signatures[1]) == 7
    seen = peer.seen("lab-s")
    assert (seen.note.text, seen.verifier.text) == (signed(TREE, 40), VERIFIER)
    for seconds in (2**40, 0, -3, 2**70):  # the clock is for readers only
        cosign(peer, 40, seconds=seconds)


def test_it_remembers_after_a_restart(tmp_path):
    first = cosign(witness.Witness(tmp_path, "lab-t"), 20)
    peer = witness.Witness(tmp_path, "lab-t")
    assert peer.size("lab-s") == 20
    refused(peer, "has 19 entries after 20", signed(TREE, 19))
    assert cosign(peer, 30).verifier == first.verifier


def test_another_log_or_a_smaller_one(peer, tmp_path):
    cosign(peer, 20)
    refused(peer, "has signed two audit logs of 20 entries", signed(OTHER, 20))
    kept = json.loads((tmp_path / "peers" / "lab-s.refused.json").read_text())
    assert kept == {"seen": signed(TREE, 20), "refused": signed(OTHER, 20)}
    for size in (0, 1, 19):
        refused(peer, "entries after 20", signed(TREE, size))
    refused(peer, "does not continue", signed(OTHER, 30), OTHER.consistency(20, 30))
    assert json.loads((tmp_path / "peers" / "lab-s.refused.json").read_text()) == kept


def test_proofs_that_prove_nothing(peer):
    text = signed(TREE, 30)
    refused(peer, "a size that was not seen here", text, TREE.consistency(7, 30))
    cosign(peer, 20)
    for proof in (
        [],
        TREE.consistency(19, 30),
        TREE.consistency(20, 31),
        TREE.consistency(20, 30)[:-1],
        [*TREE.consistency(20, 30), bytes(32)],
        [b""],
        ["x" * 32],
        [None],
        [bytes(32)] * 10_000,
    ):
        refused(peer, "does not continue that of 20", text, proof)


def test_another_key(peer):
    key = ed25519.Ed25519PrivateKey.generate()
    other = verifier("lab-s", key)
    refused(peer, "is not signed by it", signed(TREE, 5), own=other)
    cosign(peer, 20)
    text, proof = signed(TREE, 30, key), TREE.consistency(20, 30)
    refused(peer, "shows another key of its audit log", text, proof, other)
    refused(peer, "is not signed by it", text, proof)


def test_a_peer_is_witnessed_under_its_own_name_only(peer):
    text, words = signed(TREE, 5), "sent the log of another"
    refused(peer, f"{words}: nebula/lab-s", text, lab="lab-x")
    refused(peer, words, signed(TREE, 5, origin="nebula/lab-x"))
    for own in (verifier("lab-x"), verifier("lab-s", kind=checkpoint_note.WITNESS)):
        refused(peer, words, text, own=own)


@pytest.mark.parametrize("lab", ["../lab-s", "", "a/b", "lab-s\n", "lock.json", "a:b"])
def test_names_that_lead_elsewhere(peer, lab):
    with pytest.raises(audit.AuditError):
        peer.cosign(lab, signed(TREE, 5), [], VERIFIER)
    with pytest.raises(errors.NebulaError):
        peer.seen(lab)


@pytest.mark.parametrize("text", ["", "junk", "\x1b[2J" * 9_000, "\ud800"])
def test_junk(peer, text):
    refused(peer, "lab-s: ", text)
    refused(peer, "lab-s: ", signed(TREE, 5), own=text)


def test_signatures_of_others_are_not_kept(peer):
    junk = checkpoint_note.Signature("nebula/lab-x", b"1234", bytes(64)).line
    peer.cosign("lab-s", f"{signed(TREE, 5)}{junk}\n", [], VERIFIER)
    assert peer.seen("lab-s").note.text == signed(TREE, 5)


# What it keeps.


def test_each_peer_has_a_key_of_its_own(peer):
    first = cosign(peer, 20)
    text = signed(TREE, 5, origin="nebula/lab-x")
    assert peer.cosign("lab-x", text, [], verifier("lab-x")).verifier != first.verifier
    assert (peer.size("lab-s"), peer.size("lab-x")) == (20, 5)


@pytest.mark.parametrize("size", [0, -40, 40])
def test_a_damaged_state_is_not_begun_anew(tmp_path, peer, size):
    cosign(peer, 20)
    path = tmp_path / "peers" / "lab-s.json"
    path.write_text(path.read_text()[:size])
    for call in (lambda: peer.size("lab-s"), lambda: cosign(peer, 30, old=20)):
        with pytest.raises(store.StoreError, match=r"lab-s.json: the file is damaged"):
            call()


def test_nobody_else_can_read_its_keys(tmp_path, peer):
    cosign(peer, 20)
    path = tmp_path / "peers" / "lab-s.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    with pytest.raises(private_files.PrivateFileError, match="others can use it"):
        cosign(peer, 30, old=20)


def test_it_cosigns_nothing_that_it_cannot_keep(peer, monkeypatch):
    cosign(peer, 20)

    def full(path, text):
        raise private_files.PrivateFileError(f"{path}: cannot be written: full")

    monkeypatch.setattr(private_files, "write", full)
    with pytest.raises(private_files.PrivateFileError):
        cosign(peer, 30)
    assert peer.size("lab-s") == 20
