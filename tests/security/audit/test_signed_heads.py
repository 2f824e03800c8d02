"""The chain and its signed heads: to the letter, and against every flipped bit."""

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax.security.audit import signed_heads

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
WITNESS_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
LOG = signed_heads.Verifier("lab-s", signed_heads.public(KEY))
HEAD = signed_heads.sign("lab-s", 60, hashlib.sha256(b"r").digest(), KEY)
BY = signed_heads.cosign(HEAD, "lab-t", WITNESS_KEY)
COSIGNED = {"lab-t": (HEAD, BY), "lab-u": (HEAD, BY._replace(lab="lab-u"))}


def test_a_root_is_the_chain_of_all_lines_before():
    root = bytes(32)
    for count, line in enumerate((b"a", b"b", b"")):
        leaves = [signed_heads.leaf(each) for each in (b"a", b"b", b"")[:count]]
        assert signed_heads.chained(signed_heads.EMPTY, leaves) == root
        root = hashlib.sha256(root + hashlib.sha256(line).digest()).digest()


def grown(lines, size):
    """The leaves of a log, and its head of so many lines."""
    leaves = [signed_heads.leaf(line) for line in lines]
    root = signed_heads.chained(signed_heads.EMPTY, leaves[:size])
    return leaves, signed_heads.sign("lab-s", size, root, KEY)


def test_each_earlier_log_is_continued_and_no_other():
    lines = [str(number).encode() for number in range(12)]
    leaves, new = grown(lines, 12)
    for size in range(13):
        _, old = grown(lines, size)
        between = leaves[size:] if size else []
        assert signed_heads.continues(old, new, between)
        other = old._replace(root=hashlib.sha256(b"?").hexdigest())
        assert not signed_heads.continues(other, new, between)
        for junk in ([*between, leaves[0]], between[1:], between[::-1], [b""] * 12):
            if junk != between:
                assert not signed_heads.continues(old, new, junk), (size, junk)
    for altered in (0, 3, 7):
        forged = [*lines[:altered], b"forged", *lines[altered + 1 :]]
        _, other = grown(forged, 12)
        for size in range(1, 12):
            _, old = grown(lines, size)
            given = [signed_heads.leaf(line) for line in forged[size:]]
            assert signed_heads.continues(old, other, given) == (size <= altered)


def test_texts_and_what_is_signed_to_the_letter():
    root = hashlib.sha256(b"r").hexdigest()
    signed = f"nebula log 1 lab-s 60 {root}"
    KEY.public_key().verify(bytes.fromhex(HEAD.signature), signed.encode())
    assert HEAD.text == f"lab-s 60 {root} {HEAD.signature}"
    assert signed_heads.read(HEAD.text) == HEAD
    cosigned = f"nebula witness 1 lab-t of {signed}"
    public = WITNESS_KEY.public_key()
    public.verify(bytes.fromhex(BY.signature), cosigned.encode())
    assert BY.text == f"lab-t {public.public_bytes_raw().hex()} {BY.signature}"
    assert signed_heads.read_cosignature(BY.text) == BY
    assert signed_heads.read_verifier(LOG.text) == LOG
    text = signed_heads.cosigned_text(COSIGNED)
    lines = [f"{HEAD.text} {by.text}\n" for _, by in COSIGNED.values()]
    assert text == "".join(lines)
    assert signed_heads.read_cosigned(text.encode()) == COSIGNED


def test_a_signature_holds_for_its_key_log_and_witness_alone():
    assert signed_heads.is_signed(HEAD, LOG)
    assert signed_heads.is_cosigned(HEAD, BY)
    other = signed_heads.public(ed25519.Ed25519PrivateKey.generate())
    for who in (LOG._replace(lab="lab-t"), LOG._replace(key=other)):
        assert not signed_heads.is_signed(HEAD, who)
    for by in (BY._replace(lab="lab-u"), BY._replace(key=other)):
        assert not signed_heads.is_cosigned(HEAD, by)
    assert not signed_heads.is_cosigned(HEAD._replace(size=61), BY)
    # Neither serves as the other, even by one key.
    as_witness = BY._replace(key=LOG.key, signature=HEAD.signature)
    assert not signed_heads.is_cosigned(HEAD, as_witness)
    by_log = signed_heads.cosign(HEAD, "lab-t", KEY)
    assert not signed_heads.is_signed(HEAD._replace(signature=by_log.signature), LOG)


def test_every_bit_of_the_cosigned_heads_counts():
    data = signed_heads.cosigned_text({"lab-t": (HEAD, BY)}).encode()
    for place in range(8 * len(data)):
        turned = bytearray(data)
        turned[place // 8] ^= 1 << place % 8
        try:
            found = signed_heads.read_cosigned(bytes(turned))
        except signed_heads.HeadError:
            continue
        ((head, by),) = found.values()
        holds = signed_heads.is_signed(head, LOG) and signed_heads.is_cosigned(head, by)
        assert not holds, place


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "\n",
        lambda text: " " + text,
        lambda text: text.replace(" ", "  ", 1),
        lambda text: text.replace("60", "060", 1),
        lambda text: text.replace("60", "-60", 1),
        lambda text: text.replace("60", "6٠", 1),
        lambda text: text.replace("60", "9" * 30, 1),
        lambda text: text.replace("lab-s", "lab s"),
        lambda text: text.replace("lab-s", "x" * 64),
        lambda text: text.upper(),
        lambda text: text + "\x1b[2J" * 50_000,
        lambda text: "\ud800" + text,
    ],
)
def test_what_is_none(change):
    for read, text in (
        (signed_heads.read, HEAD.text),
        (signed_heads.read_cosignature, BY.text.replace("lab-t", "lab-s 60")),
        (signed_heads.read_verifier, LOG.text.replace("lab-s", "lab-s 60")),
    ):
        with pytest.raises(signed_heads.HeadError, match="is no ") as why:
            read(change(text))
        assert str(why.value).isprintable()
        assert len(str(why.value)) < 300


def test_cosigned_heads_are_written_in_one_way():
    text = signed_heads.cosigned_text(COSIGNED)
    one, other = text.splitlines(True)
    for bad in (other + one, one + one, text + "\n", text[:-1], "\n", text + "junk\n"):
        with pytest.raises(signed_heads.HeadError):
            signed_heads.read_cosigned(bad.encode())
    assert signed_heads.read_cosigned(b"") == {}
