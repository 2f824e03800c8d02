"""A simulated disk: what is written, and what of it a power cut leaves."""

import copy
import errno
import hashlib
import os
import pathlib
import random
from collections.abc import Callable

OPERATION_SECONDS = 0.002


class Disk:
    """The files of one host, with the functions of `nebula_jax.disk`. Names lead to
    nodes, each a file or folder, which remember what they held since they were flushed:
    after a power cut they hold one of these."""

    def __init__(self, seed: int, wait: Callable[[float], None]) -> None:
        """Makes an empty disk; wait: takes so many seconds of the caller's time."""
        self._random, self._wait = random.Random(seed), wait
        self._root = Node({})
        self.is_full = self.is_failing = False  # writing raises ENOSPC; anything EIO

    # As production code calls it; see `nebula_jax.disk`.

    def names(self, folder: pathlib.Path) -> list[str]:
        self._check()
        node = self._find(folder)
        return [] if node is None else sorted(node.folder())

    def files(self, folder: pathlib.Path) -> list[str]:
        self._check()
        node = self._find(folder)
        return [] if node is None else sorted(_below(node, ""))

    def read(self, path: pathlib.Path) -> bytes:
        self._check()
        return self._get(path).data()

    def digest(self, path: pathlib.Path) -> str:
        return hashlib.sha256(self.read(path)).hexdigest()

    def write(self, path: pathlib.Path, data: bytes) -> None:
        self._check()
        parent = self._get(path.parent)
        node = parent.folder().get(path.name)
        if node is None:
            node = Node(b"")
            parent.put({**parent.folder(), path.name: node})
        if self.is_full:
            node.put(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        node.put(data)

    def sync(self, path: pathlib.Path) -> None:
        self._check()
        self._get(path).flush()

    def rename(self, old: pathlib.Path, new: pathlib.Path) -> None:
        self._check()
        parent, node = self._get(new.parent), self._get(old)
        names = dict(parent.folder())
        if new.name in names and names[new.name].folder():
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        assert old.parent == new.parent, "no other rename is simulated"
        del names[old.name]
        parent.put({**names, new.name: node})

    def remove(self, path: pathlib.Path) -> None:
        self._check()
        node, parent = self._get(path), self._get(path.parent)
        if isinstance(node.now, dict):
            for name in sorted(node.now):
                self.remove(path / name)
        names = dict(parent.folder())
        del names[path.name]
        parent.put(names)

    def make_folder(self, path: pathlib.Path) -> None:
        self._check()
        if self._find(path) is None:
            self.make_folder(path.parent)
            parent = self._get(path.parent)
            parent.put({**parent.folder(), path.name: Node({})})
            parent.flush()

    # What happens to it.

    def lose_power(self) -> None:
        """Drops what was not flushed, or keeps some of it: nobody promises which."""
        self._root.settle(self._random)

    def clone(self, other: "Disk") -> None:
        """Takes over what another disk holds."""
        self._root = copy.deepcopy(other._root)

    def damage(self, path: pathlib.Path, kind: int) -> None:
        """Flips a bit of a file below a folder (0), cuts it (1), or removes it (2)."""
        folder = self._find(path)
        names = [] if folder is None else sorted(_below(folder, ""))
        if not names:
            return
        path /= self._random.choice(names)
        node, parent = self._get(path), self._get(path.parent)
        data = bytearray(node.data())
        if kind == 0 and data:
            place = self._random.randrange(8 * len(data))
            data[place // 8] ^= 1 << place % 8
        elif kind == 1:
            del data[len(data) // 2 :]
        else:
            parent.put({k: v for k, v in parent.folder().items() if k != path.name})
            parent.flush()
        node.put(bytes(data))
        node.flush()

    def glance(self, folder: pathlib.Path) -> dict[str, dict[str, bytes]]:
        """Returns folder -> file -> bytes of what is in a folder's folders, at once."""
        node = self._find(folder)
        return {
            name: {
                file: each.now
                for file, each in child.now.items()
                if isinstance(each.now, bytes)
            }
            for name, child in (node.folder() if node else {}).items()
            if isinstance(child.now, dict)
        }

    def _check(self) -> None:
        self._wait(OPERATION_SECONDS)
        if self.is_failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _find(self, path: pathlib.Path) -> "Node | None":
        node = self._root
        for part in path.parts[1:]:
            if not isinstance(node.now, dict) or part not in node.now:
                return None
            node = node.now[part]
        return node

    def _get(self, path: pathlib.Path) -> "Node":
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node


class Node:
    """A file or a folder: what it holds now, and held since it was flushed."""

    def __init__(self, content: "bytes | dict[str, Node]") -> None:
        self.now = content
        self._since = [content if isinstance(content, dict) else b""]

    def data(self) -> bytes:
        if isinstance(self.now, dict):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return self.now

    def folder(self) -> "dict[str, Node]":
        if not isinstance(self.now, dict):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return self.now

    def put(self, content: "bytes | dict[str, Node]") -> None:
        self.now = content
        self._since.append(content)

    def flush(self) -> None:
        self._since = [self.now]

    def settle(self, dice: random.Random) -> None:
        """Makes of it what a power cut leaves: a folder as it was at some time since it
        was flushed, a file any beginning of what it then held."""
        is_flushed = len(self._since) == 1 and self._since[0] is self.now
        self.now = dice.choice(self._since)
        if isinstance(self.now, dict):
            for name in sorted(self.now):
                self.now[name].settle(dice)
        elif not is_flushed:
            self.now = self.now[: dice.choice([0, len(self.now) // 2, len(self.now)])]
        self.flush()


def _below(node: Node, prefix: str) -> list[str]:
    found = []
    for name, child in node.folder().items():
        if isinstance(child.now, dict):
            found += _below(child, f"{prefix}{name}/")
        else:
            found.append(prefix + name)
    return found
