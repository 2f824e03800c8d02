"""The text of checkpoints, against C2SP's own example and against every flipped bit."""

import base64
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax.security.audit import checkpoint_note

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
WITNESS_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
LOG = checkpoint_note.verifier("nebula/lab-s", checkpoint_note.LOG, KEY)
WITNESS = checkpoint_note.verifier(
    "nebula/lab-t/witness", checkpoint_note.WITNESS, WITNESS_KEY
)
CHECKPOINT = checkpoint_note.Checkpoint(
    "nebula/lab-s", 60, hashlib.sha256(b"r").digest()
)

EXAMPLE = """example.com/behind-the-sofa
20852163
CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

— example.com/behind-the-sofa \
Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=
— witness.example.com/w1 \
jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA==
"""
"""The checkpoint that c2sp.org/tlog-cosignature shows."""


def cosigned():
    note = checkpoint_note.sign(CHECKPOINT, KEY)
    line = checkpoint_note.cosign(CHECKPOINT, WITNESS.name, WITNESS_KEY, 1_679_315_147)
    return note._replace(signatures=(*note.signatures, line))


def test_the_example_of_the_specification():
    note = checkpoint_note.read(EXAMPLE)
    assert note.checkpoint[:2] == ("example.com/behind-the-sofa", 20852163)
    own, witness = note.signatures
    assert (own.name, own.id.hex()) == ("example.com/behind-the-sofa", "033de0ae")
    assert len(own.signature) == 64
    assert (witness.name, len(witness.signature)) == ("witness.example.com/w1", 72)
    assert checkpoint_note.cosigned_at(witness) == 1_679_315_147
    assert note.text == EXAMPLE


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        (
            "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
            *("PeterNeumann", checkpoint_note.LOG),
        ),
        (
            "TEST+7997405c+AQcC+FTVKf0jlTdHDY3rbevmnKxxPjigCXlVtGe6RIr6",
            *("TEST", checkpoint_note.LOG),
        ),
        (
            "remora.n621.de+da77ade7+BOvN63jn/bLvkieywe8R6UYAtVtNbZpXh34x7onlmtw2",
            *("remora.n621.de", checkpoint_note.WITNESS),
        ),
    ],
)
def test_public_keys_that_others_have_published(text, name, kind):
    read = checkpoint_note.read_verifier(text)
    assert (read.name, read.type, read.text) == (name, kind, text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "name+12345678", "name+12345678+AAAA"),
        "PeterNeumann+c74f20a4+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+C74F20A3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW\n",
        "Peter Neumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        checkpoint_note.verifier("a", 0x02, KEY).text,
        checkpoint_note.verifier("a", 0x06, KEY).text,
        "a\x1b[2J" * 50_000,
    ],
)
def test_what_is_no_public_key(text):
    with pytest.raises(checkpoint_note.NoteError, match="is no Ed25519 key") as why:
        checkpoint_note.read_verifier(text)
    assert "\x1b" not in str(why.value)
    assert len(str(why.value)) < 300


def test_what_is_signed_is_what_the_specification_signs():
    note = cosigned()
    root = base64.b64encode(CHECKPOINT.root).decode()
    body = f"nebula/lab-s\n60\n{root}\n"
    own, witness = note.signatures
    KEY.public_key().verify(own.signature, body.encode())
    message = f"cosignature/v1\ntime 1679315147\n{body}".encode()
    WITNESS_KEY.public_key().verify(witness.signature[8:], message)
    for signature, who in ((own, LOG), (witness, WITNESS)):
        seed = who.name.encode() + b"\n" + bytes([who.type]) + who.key
        assert signature.id == hashlib.sha256(seed).digest()[:4]
    assert note.text == f"{body}\n{own.line}\n{witness.line}\n"
    assert checkpoint_note.read(note.text) == note


def test_a_signature_holds_for_its_key_alone():
    note = cosigned()
    assert checkpoint_note.is_signed(note, LOG)
    assert checkpoint_note.is_signed(note, WITNESS)
    other = ed25519.Ed25519PrivateKey.generate()
    for name, kind, key in (
        ("nebula/lab-s", checkpoint_note.LOG, other),
        ("nebula/lab-s", checkpoint_note.WITNESS, KEY),
        ("nebula/lab-t", checkpoint_note.LOG, KEY),
        ("nebula/lab-t/witness", checkpoint_note.WITNESS, KEY),
    ):
        who = checkpoint_note.verifier(name, kind, key)
        assert not checkpoint_note.is_signed(note, who)


def test_one_wrong_signature_of_a_key_spoils_the_right_one():
    note = cosigned()
    wrong = note.signatures[0]._replace(signature=bytes(64))
    spoilt = note._replace(signatures=(*note.signatures, wrong))
    assert not checkpoint_note.is_signed(spoilt, LOG)
    assert checkpoint_note.is_signed(spoilt, WITNESS)


@pytest.mark.parametrize("signature", [b"x", bytes(7), bytes(63), bytes(65), bytes(80)])
def test_signatures_of_other_lengths(signature):
    for who in (LOG, WITNESS):
        line = checkpoint_note.Signature(who.name, who.id, signature)
        note = checkpoint_note.Note(CHECKPOINT, (line,))
        assert not checkpoint_note.is_signed(note, who)


def test_a_time_beyond_all_times():
    message = f"cosignature/v1\ntime {2**63}\n{CHECKPOINT.text}".encode()
    data = (2**63).to_bytes(8, "big") + WITNESS_KEY.sign(message)
    line = checkpoint_note.Signature(WITNESS.name, WITNESS.id, data)
    assert not checkpoint_note.is_signed(
        checkpoint_note.Note(CHECKPOINT, (line,)), WITNESS
    )
    for seconds, expected in ((-5, 0), (2**70, 2**63 - 1)):
        line = checkpoint_note.cosign(CHECKPOINT, WITNESS.name, WITNESS_KEY, seconds)
        assert checkpoint_note.cosigned_at(line) == expected


def test_every_bit_of_a_note_counts():
    note = cosigned()
    data = note.text.encode()
    for place in range(8 * len(data)):
        turned = bytearray(data)
        turned[place // 8] ^= 1 << place % 8
        try:
            read = checkpoint_note.read(turned.decode())
        except (UnicodeDecodeError, checkpoint_note.NoteError):
            continue
        assert not (
            checkpoint_note.is_signed(read, LOG)
            and checkpoint_note.is_signed(read, WITNESS)
        ), place


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "\n",
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("60", "060"),
        lambda text: text.replace("60", "-60"),
        lambda text: text.replace("60", "6٠"),
        lambda text: text.replace("60", "9" * 30),
        lambda text: text.replace("nebula/lab-s\n60", "nebula/lab s\n60"),
        lambda text: text.replace("60\n", "60\n\n"),
        lambda text: text.replace("=\n\n", "=\nextension\n\n"),
        lambda text: text.replace("=\n\n", "\n\n", 1),
        lambda text: text.partition("\n\n")[0] + "\n\n",
        lambda text: text.replace("— ", "- "),
        lambda text: text + "junk\n",
        lambda text: text + "x" * 20_000,
        lambda text: text * 200,
        lambda text: "\ud800" + text,
    ],
)
def test_what_is_no_note(change):
    with pytest.raises(checkpoint_note.NoteError) as why:
        checkpoint_note.read(change(cosigned().text))
    assert "\n" not in str(why.value)


@pytest.mark.parametrize(
    "line", ["", "— a", "— a AAAA", "— a b AAAAAAAA", "x" * 10_000]
)
def test_what_is_no_line(line):
    with pytest.raises(checkpoint_note.NoteError, match="is no line of a signature"):
        checkpoint_note.read_line(line)


@pytest.mark.parametrize("lab", ["", "../x", "lab s", "Lab", "lab:s", "lab/s", "a+b"])
def test_a_log_is_named_after_a_lab(lab):
    with pytest.raises(checkpoint_note.NoteError, match="is no lab's name"):
        checkpoint_note.origin(lab)


def test_names():
    assert checkpoint_note.origin("lab-s") == "nebula/lab-s"
    assert checkpoint_note.witness_name("lab-s") == "nebula/lab-s/witness"
