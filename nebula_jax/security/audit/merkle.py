"""Merkle trees over the entries of a log, and proofs about them (RFC 6962, RFC 9162).

    tree = merkle.Tree()
    for entry in entries:
        tree.append(merkle.leaf(entry))
    proof = tree.consistency(old, tree.size)
    assert merkle.is_consistent(old, old_root, tree.size, tree.root(), proof)

A leaf's hash is SHA-256(0x00 || entry), that of an inner node SHA-256(0x01 || left ||
right): no entry can pass for a node. Of n leaves, the left branch has the largest power
of two below n. Indices count from 0; positions in the comments are halves of a range
[begin, end) of leaves. Everything here works on hashes and has no input or output.
"""

import hashlib
from collections.abc import Sequence

SIZE = 32
"""Bytes of a hash."""
EMPTY = hashlib.sha256().digest()
"""The root of a tree without leaves."""
LONGEST_PROOF = 128
"""Hashes of a proof: those about 2 ** 64 leaves have fewer; a longer one is junk."""


def leaf(entry: bytes) -> bytes:
    """Returns the hash of an entry of the log."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node(left: bytes, right: bytes) -> bytes:
    """Returns the hash of an inner node, given the hashes of its branches."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """A tree that grows at its end, with the roots and proofs of each size it had.

    It keeps the hash of every complete subtree, 64 bytes a leaf. `append` hashes two
    nodes on average, everything else O(log n).
    """

    def __init__(self) -> None:
        """Begins without a leaf."""
        # Level h holds the roots of all complete subtrees of 2 ** h leaves, in order.
        self._levels = [bytearray()]

    @property
    def size(self) -> int:
        """The number of leaves."""
        return len(self._levels[0]) // SIZE

    def leaves(self, begin: int) -> bytes:
        """Returns the hashes of the leaves from an index on."""
        return bytes(self._levels[0][SIZE * begin :])

    def append(self, hashed: bytes) -> int:
        """Adds a leaf, given its hash, and returns its index."""
        index = place = self.size
        level = self._levels[0]
        level += hashed
        height = 1
        while place & 1:  # its left neighbor is there: their parent is complete
            above = hashlib.sha256(b"\x01" + level[-2 * SIZE :]).digest()
            if height == len(self._levels):
                self._levels.append(bytearray())
            level = self._levels[height]
            level += above
            place >>= 1
            height += 1
        return index

    def root(self, size: int | None = None) -> bytes:
        """Returns the root of the first `size` leaves; None for all.

        Raises:
          ValueError: if the tree has not that many.
        """
        size = self._checked(size)
        return self._range(0, size) if size else EMPTY

    def consistency(self, old: int, size: int | None = None) -> list[bytes]:
        """Proves that the tree of `size` leaves continues that of `old` leaves.

        Args:
          old: a size that it had; of 0, which everything continues, the proof is empty.
          size: None for the whole tree.

        Returns:
          The hashes of `PROOF(old, D[size])`, RFC 6962 section 2.1.2.

        Raises:
          ValueError: if it has not had these sizes in this order.
        """
        end = self._checked(size)
        if not 0 <= old <= end:
            raise ValueError(f"a tree of {end} leaves does not continue one of {old}")
        begin, path, is_old_root = 0, [], True
        while old and old != end:
            middle = begin + _split(end - begin)
            if old <= middle:
                path.append(self._range(middle, end))
                end = middle
            else:
                path.append(self._range(begin, middle))
                begin = middle
                is_old_root = False
        if old and not is_old_root:
            path.append(self._range(begin, end))
        return path[::-1]

    def _checked(self, size: int | None) -> int:
        if size is None:
            return self.size
        if not 0 <= size <= self.size:
            raise ValueError(f"there is no size {size} of a tree of {self.size} leaves")
        return size

    def _range(self, begin: int, end: int) -> bytes:
        """Returns the hash of a branch: leaves from `begin` on, before `end`."""
        count = end - begin
        if count & (count - 1) == 0:  # complete: it begins at a multiple of its size
            height = count.bit_length() - 1
            place = SIZE * (begin >> height)
            return bytes(self._levels[height][place : place + SIZE])
        middle = begin + _split(count)
        return node(self._range(begin, middle), self._range(middle, end))


def is_consistent(
    old: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> bool:
    """Returns True if a proof shows that one tree continues another (2.1.4.2).

    Args:
      proof: see `Tree.consistency`; any bytes.
    """
    if not 0 <= old <= size or not _is_proof(proof):
        return False
    if old == 0:
        return not proof and old_root == EMPTY and (size > 0 or root == EMPTY)
    if old == size:
        return not proof and old_root == root
    if old & (old - 1) == 0:  # the earlier tree is itself a node of the later one
        proof = [old_root, *proof]
    if not proof:
        return False
    place, last = old - 1, size - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    old_hash = new_hash = proof[0]
    for each in proof[1:]:
        if last == 0:
            return False
        if place & 1 or place == last:
            old_hash, new_hash = node(each, old_hash), node(each, new_hash)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            new_hash = node(new_hash, each)
        place, last = place >> 1, last >> 1
    return last == 0 and old_hash == old_root and new_hash == root


def _split(count: int) -> int:
    """Returns the largest power of two below a count of at least 2."""
    return 1 << (count - 1).bit_length() - 1


def _is_proof(proof: Sequence[bytes]) -> bool:
    return len(proof) <= LONGEST_PROOF and all(
        isinstance(each, bytes) and len(each) == SIZE for each in proof
    )
