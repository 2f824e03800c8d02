"""The witness: what it refuses, and what it remembers."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax import errors
from nebula_jax.security import audit, private_files
from nebula_jax.security.audit import signed_heads, witness

KEY = ed25519.Ed25519PrivateKey.generate()


def verifier(lab, key=KEY):
    return signed_heads.Verifier(lab, signed_heads.public(key)).text


VERIFIER = verifier("lab-s")
LEAVES, OTHER = (
    [signed_heads.leaf(f"{name} {number}".encode()) for number in range(40)]
    for name in ("entry", "other")
)


def signed(leaves, size, key=KEY, lab="lab-s"):
    root = signed_heads.chained(signed_heads.EMPTY, leaves[:size])
    return signed_heads.sign(lab, size, root, key).text


@pytest.fixture
def peer(tmp_path):
    return witness.Witness(tmp_path)


def keep(peer, size, old=None):
    old = peer.size("lab-s") if old is None else old
    given = LEAVES[old:size] if old else []
    return peer.keep("lab-s", signed(LEAVES, size), given, VERIFIER)


def refused(peer, words, text, proof=(), own=VERIFIER, lab="lab-s"):
    """Asserts that a head is refused and nothing about it kept."""
    before = kept(peer)
    with pytest.raises(audit.AuditError, match=words) as why:
        peer.keep(lab, text, proof, own)
    assert "\n" not in str(why.value)
    assert kept(peer) == before


def kept(peer):
    return (seen := peer.seen("lab-s")) and seen.head.text


def test_it_keeps_what_continues(peer, tmp_path):
    assert peer.seen("lab-s") is None
    for size in (0, 5, 5, 8, 33, 40):
        assert keep(peer, size).text == signed(LEAVES, size)
        assert peer.size("lab-s") == size
    seen = witness.Witness(tmp_path).seen("lab-s")  # and after a restart
    assert (seen.head.text, seen.verifier.text) == (signed(LEAVES, 40), VERIFIER)
    refused(peer, "has 39 entries after 40", signed(LEAVES, 39))


def test_another_log_or_a_smaller_one(peer, tmp_path):
    keep(peer, 20)
    refused(peer, "has signed two audit logs of 20 entries", signed(OTHER, 20))
    kept = json.loads((tmp_path / "peers" / "lab-s.refused.json").read_text())
    assert kept == {"seen": signed(LEAVES, 20), "refused": signed(OTHER, 20)}
    for size in (0, 1, 19):
        refused(peer, "entries after 20", signed(LEAVES, size))
    refused(peer, "does not continue", signed(OTHER, 30), OTHER[20:30])
    assert json.loads((tmp_path / "peers" / "lab-s.refused.json").read_text()) == kept


def test_hashes_that_prove_nothing(peer):
    text = signed(LEAVES, 30)
    refused(peer, "a size that was not seen here", text, LEAVES[7:30])
    keep(peer, 20)
    for leaves in ([], LEAVES[19:30], LEAVES[20:29], OTHER[20:30], [b""] * 10):
        refused(peer, "does not continue that of 20", text, leaves)


def test_another_key(peer):
    key = ed25519.Ed25519PrivateKey.generate()
    other = verifier("lab-s", key)
    refused(peer, "is not signed by it", signed(LEAVES, 5), own=other)
    keep(peer, 20)
    text, leaves = signed(LEAVES, 30, key), LEAVES[20:30]
    refused(peer, "shows another key of its audit log", text, leaves, other)
    refused(peer, "is not signed by it", text, leaves)


def test_the_key_of_a_log_that_is_known_beforehand(tmp_path):
    """A lab that comes first cannot begin another log of the authority's lab."""
    key = ed25519.Ed25519PrivateKey.generate()
    known = witness.Witness(tmp_path, signed_heads.read_verifier(VERIFIER))
    text, other = signed(LEAVES, 5, key), verifier("lab-s", key)
    refused(known, "than the authority's certificate names", text, own=other)
    keep(known, 20)
    known.keep("lab-x", signed(LEAVES, 5, key, "lab-x"), [], verifier("lab-x", key))


def test_a_peer_is_witnessed_under_its_own_name_only(peer):
    text, words = signed(LEAVES, 5), "sent the log of lab-"
    refused(peer, words, text, lab="lab-x")
    refused(peer, words, signed(LEAVES, 5, lab="lab-x"))
    refused(peer, "is not signed by it", text, own=verifier("lab-x"))


@pytest.mark.parametrize("lab", ["../lab-s", "", "a/b", "lab-s\n", "lock.json", "a:b"])
def test_names_that_lead_elsewhere(peer, lab):
    with pytest.raises(errors.NebulaError):
        peer.keep(lab, signed(LEAVES, 5), [], VERIFIER)
    with pytest.raises(errors.NebulaError):
        peer.seen(lab)


@pytest.mark.parametrize("text", ["", "junk", "\x1b[2J" * 9_000, "\ud800"])
def test_junk(peer, text):
    refused(peer, "lab-s: ", text)
    refused(peer, "lab-s: ", signed(LEAVES, 5), own=text)


# What it keeps.


def test_each_peer_is_seen_by_itself(peer):
    keep(peer, 20)
    peer.keep("lab-x", signed(LEAVES, 5, lab="lab-x"), [], verifier("lab-x"))
    assert (peer.size("lab-s"), peer.size("lab-x")) == (20, 5)


def test_a_damaged_state_is_not_begun_anew(tmp_path, peer):
    keep(peer, 20)
    path = tmp_path / "peers" / "lab-s.seen"
    text = path.read_text()
    for bad in ("", text[:-40], text[:40], text.replace(" 20 ", " 10 "), text + "\n"):
        path.write_text(bad)
        for call in (lambda: peer.size("lab-s"), lambda: keep(peer, 30, old=20)):
            with pytest.raises(audit.AuditError, match=r"lab-s.seen: .* is damaged"):
                call()


def test_nobody_else_can_write_what_was_seen(tmp_path, peer):
    keep(peer, 20)
    path = tmp_path / "peers" / "lab-s.seen"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    with pytest.raises(private_files.PrivateFileError, match="others can use it"):
        keep(peer, 30, old=20)


def test_nothing_may_be_cosigned_that_cannot_be_kept(peer, monkeypatch):
    keep(peer, 20)

    def full(path, text):
        raise private_files.PrivateFileError(f"{path}: cannot be written: full")

    monkeypatch.setattr(private_files, "write", full)
    with pytest.raises(private_files.PrivateFileError):
        keep(peer, 30)
    assert peer.size("lab-s") == 20
