"""Merkle trees against the recursive definitions of RFC 6962 and published vectors."""

import hashlib

import hypothesis
import pytest
from hypothesis import strategies as st

from nebula_jax.security.audit import merkle

# The entries, roots and proofs that implementations of Certificate Transparency share.
ENTRIES = [
    bytes.fromhex(each)
    for each in (
        *("", "00", "10", "2021", "3031", "40414243", "5051525354555657"),
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
PROOFS = {  # (old size, size) -> proof
    (1, 1): [],
    (1, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
SIZES = range(33)


# The definitions of RFC 6962, section 2.1, word for word.


def split(entries):
    power = 1
    while 2 * power < len(entries):
        power *= 2
    return power


def mth(entries):
    if not entries:
        return hashlib.sha256().digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    k = split(entries)
    return hashlib.sha256(b"\x01" + mth(entries[:k]) + mth(entries[k:])).digest()


def subproof(m, entries, is_whole):
    if m == len(entries):
        return [] if is_whole else [mth(entries)]
    k = split(entries)
    if m <= k:
        return [*subproof(m, entries[:k], is_whole), mth(entries[k:])]
    return [*subproof(m - k, entries[k:], False), mth(entries[:k])]


def tree_of(entries):
    tree = merkle.Tree()
    for index, entry in enumerate(entries):
        assert tree.append(merkle.leaf(entry)) == index
    return tree


def numbered(size):
    return [str(number).encode() for number in range(size)]


def test_the_vectors_of_certificate_transparency():
    tree = tree_of(ENTRIES)
    assert [tree.root(size).hex() for size in range(9)] == ROOTS
    assert [mth(ENTRIES[:size]).hex() for size in range(9)] == ROOTS
    for (old, size), expected in PROOFS.items():
        assert [each.hex() for each in tree.consistency(old, size)] == expected


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(st.binary(max_size=40), max_size=70), st.data())
def test_roots_and_proofs_are_those_of_the_definitions(entries, data):
    tree = tree_of(entries)
    assert tree.size == len(entries)
    assert tree.root() == mth(entries)
    size = data.draw(st.integers(0, len(entries)))
    assert tree.root(size) == mth(entries[:size])
    if size:
        old = data.draw(st.integers(1, size))
        assert tree.consistency(old, size) == subproof(old, entries[:size], True)


@pytest.mark.parametrize("size", SIZES)
def test_each_earlier_tree_is_continued_and_no_other(size):
    tree = tree_of(numbered(size))
    root = tree.root()
    for old in range(size + 1):
        proof, old_root = tree.consistency(old), tree.root(old)
        assert merkle.is_consistent(old, old_root, size, root, proof)
        other = mth([b"?", *numbered(old)[1:]]) if old else mth([b"?"])
        assert not merkle.is_consistent(old, other, size, root, proof)
        if size:
            assert (
                not merkle.is_consistent(old, old_root, size, other, proof) or not old
            )
        assert not merkle.is_consistent(size + 1, root, size, root, proof)
        assert not merkle.is_consistent(-1, root, size, root, proof)
        for bad in altered(proof):
            assert not merkle.is_consistent(old, old_root, size, root, bad)


def altered(proof):
    """Yields proofs that differ from one by a hash or more."""
    some = merkle.leaf(b"some")
    yield [*proof, some]
    yield [some, *proof]
    yield [*proof, b"short"]
    for place, each in enumerate(proof):
        yield proof[:place] + proof[place + 1 :]
        flipped = bytes([each[0] ^ 1]) + each[1:]
        yield [*proof[:place], flipped, *proof[place + 1 :]]
    if len(proof) > 1:
        yield [proof[1], proof[0], *proof[2:]]


def test_a_log_with_one_entry_changed_does_not_continue_the_old_one():
    entries = numbered(20)
    forged = [*entries[:3], b"forged", *entries[4:]]
    tree, other = tree_of(entries), tree_of(forged)
    for old in range(4, 21):
        proof = other.consistency(old, 20)
        assert not merkle.is_consistent(old, tree.root(old), 20, other.root(20), proof)
    for old in range(1, 4):
        proof = other.consistency(old, 20)
        assert merkle.is_consistent(old, tree.root(old), 20, other.root(20), proof)


@pytest.mark.parametrize(
    "junk",
    [
        ["x" * merkle.SIZE],
        [None],
        [bytearray(merkle.SIZE)],
        [b""],
        [bytes(merkle.SIZE)] * 100_000,
    ],
    ids=["text", "None", "bytearray", "empty", "long"],
)
def test_junk_proves_nothing(junk):
    tree = tree_of(numbered(9))
    assert not merkle.is_consistent(4, tree.root(4), 9, tree.root(), junk)


def test_an_entry_cannot_pass_for_a_node():
    left, right = merkle.leaf(b"a"), merkle.leaf(b"b")
    assert merkle.leaf(left + right) != merkle.node(left, right)
    assert tree_of([left + right]).root() != tree_of([b"a", b"b"]).root()


def test_sizes_that_there_never_were():
    tree = tree_of(numbered(5))
    for call in (
        lambda: tree.root(6),
        lambda: tree.root(-1),
        lambda: tree.consistency(6),
        lambda: tree.consistency(-1),
        lambda: tree.consistency(3, 2),
        lambda: tree.consistency(3, 6),
    ):
        with pytest.raises(ValueError, match=r"there is no|does not continue"):
            call()


def test_a_root_and_a_proof_of_many_entries_take_few_hashes(monkeypatch):
    size = 2**14 - 1  # the worst: every level has a branch of its own
    tree = merkle.Tree()
    for _ in range(size):
        tree.append(bytes(merkle.SIZE))
    node, count = merkle.node, []

    def counting(left, right):
        count.append(1)
        return node(left, right)

    monkeypatch.setattr(merkle, "node", counting)
    tree.root()
    assert len(count) == 13
    count.clear()
    assert len(tree.consistency(1)) == 14
    assert len(count) < 14 * 14 / 2
