"""The files of a cluster's checkpoints: how they are written, and which of them count.

    FOLDER/00000040/manifest.json   step, metadata, SHA-256 of every other file
    FOLDER/00000040/...             what the array writer wrote
    FOLDER/00000060.partial/        being written or removed: counts for nothing
    FOLDER/00000080.later/          set aside: the run went on from an earlier step
    FOLDER/00000020.damaged/        set aside, and never removed

A checkpoint gets its final name when all of it is flushed to the disk, so that name
holds a whole checkpoint unless something damaged it since. Nothing is removed but
`.partial`, and checkpoints of this run that it has superseded with newer ones.
(`orbax.checkpoint.CheckpointManager(max_to_keep)` counts steps that have no manifest
yet, and removes good ones in their favor.)

Every access goes through `nebula_jax.disk`, so that this code runs on a simulated disk
as well. A crash is a BaseException out of it, and passes through here untouched; an
OSError becomes a CheckpointError.
"""

import contextlib
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nebula_jax import disk, errors

PARTIAL, LATER, DAMAGED = ".partial", ".later", ".damaged"

_STEP = re.compile(r"\d{8}|[1-9]\d{8,9}")
_TORN = re.compile(rf"({_STEP.pattern})\.partial")

MANIFEST = "manifest.json"  # in a checkpoint's own folder: the two cannot be parted
# Metadata of a checkpoint -> what is another run's, in words; empty if nothing is.
Differs = Callable[[dict[str, Any]], str]


class CheckpointError(errors.NebulaError):
    """A checkpoint cannot be written, read, or used by this run."""


class Manifest(NamedTuple):
    """The metadata of a checkpoint and the digests of its files."""

    about: dict[str, Any]  # metadata: JSON values
    files: dict[str, str]  # relative path of a file -> SHA-256 in hexadecimal


def encode_manifest(
    step: int, about: Mapping[str, Any], digests: Mapping[str, str]
) -> bytes:
    """Encodes a manifest; `digests` are of each file SHA-256 in hexadecimal."""
    content = {"step": step, "about": dict(about), "files": dict(digests)}
    content = json.loads(json.dumps(content))  # as it will be read: tuples are lists
    return json.dumps(content | {"digest": _digest_of(content)}, indent=1).encode()


def decode_manifest(data: bytes, step: int) -> Manifest:
    """Decodes the manifest of a step; ValueError, in words, if it is another thing."""
    try:
        content = json.loads(data)
        digest = content.pop("digest")
        is_whole = digest == _digest_of(content)
        found = Manifest(dict(content["about"]), dict(content["files"]))
        of_step = content["step"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{MANIFEST} is no manifest") from None
    if not is_whole:
        raise ValueError(f"{MANIFEST} differs from what was written")
    if of_step != step:
        raise ValueError(f"{MANIFEST} is that of step {of_step}")
    if not found.files:
        raise ValueError(f"{MANIFEST} lists no files")
    return found


def _manifest(folder: pathlib.Path, step: int) -> Manifest:
    """Reads the manifest of a checkpoint; ValueError, in words, if it is damaged."""
    if MANIFEST not in disk.names(folder):
        raise ValueError(f"{MANIFEST} is missing")
    return decode_manifest(disk.read(folder / MANIFEST), step)


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Folder:
    """A cluster's folder of checkpoints, of which no other process writes any."""

    def __init__(
        self, path: pathlib.Path, differs: Differs, log: Callable[[str], None]
    ) -> None:
        """Reads every checkpoint of a folder, which need not be there; changes nothing.

        Metadata are compared with this run's by `differs`. CheckpointError if there are
        checkpoints, but none that this run can use.
        """
        self.path, self._log, self._differs = path, log, differs
        try:
            self.steps, self._damaged = _examine(path, differs)
            """`steps`: with a good checkpoint of this run, ascending."""
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {reason(error)}") from None
        if self._damaged and not self.steps:
            raise CheckpointError(_none_usable(path, self._damaged))
        for step, damage in self._damaged.items():
            log(f"checkpoint of step {step} in {path} is damaged ({damage}); unused")

    def go_on_from(self, step: int) -> None:
        """Sets aside what must not count when the run goes on from a step.

        One of `steps`, or 0; that of all clusters. CheckpointError if the disk refuses.
        """
        try:
            self._remove_torn()
            for damaged in list(self._damaged):
                self._set_aside(damaged)
            for later in [saved for saved in self.steps if saved > step]:
                self._set_aside(later)
            if disk.names(self.path):
                disk.sync(self.path)
        except OSError as error:
            raise CheckpointError(
                f"cannot set checkpoints aside in {self.path}: {reason(error)}"
            ) from None

    def save(
        self,
        step: int,
        about: Mapping[str, Any],
        write_arrays: Callable[[pathlib.Path], None],
        keep: int,
    ) -> None:
        """Writes the checkpoint of a step, then removes what it supersedes.

        `about` are JSON values: data position, settings; `write_arrays` writes files
        into a folder, which is there. The newest `keep` stay, this one included. Raises
        CheckpointError if it cannot be written, such as on a full disk: then all stay.
        """
        partial = self.path / f"{step:08d}{PARTIAL}"
        try:
            self._remove_torn()
            disk.make_folder(partial)
            write_arrays(partial)
            self._write_manifest(partial, step, about)
            if f"{step:08d}" in disk.names(self.path):
                self._set_aside(step)
            disk.rename(partial, self._final(step))
            disk.sync(self.path)
        except Exception as error:  # array writers raise many kinds
            with contextlib.suppress(OSError):  # the next save removes it, or start
                disk.remove(partial)
            raise CheckpointError(
                f"could not save step {step} in {self.path}: {reason(error)}"
            ) from None
        self.steps = sorted({*self.steps, step})
        self._remove_superseded(step, keep)

    def _write_manifest(
        self, partial: pathlib.Path, step: int, about: Mapping[str, Any]
    ) -> None:
        """Writes the manifest, and returns when all of the checkpoint is durable."""
        names = disk.files(partial)
        for name in names:
            disk.sync(partial / name)
        digests = {name: disk.digest(partial / name) for name in names}
        path = partial / MANIFEST
        disk.write(path, encode_manifest(step, about, digests))
        disk.sync(path)
        below = {parent for name in names for parent in pathlib.PurePath(name).parents}
        for folder in {partial, *(partial / each for each in below)}:
            disk.sync(folder)

    def _remove_torn(self) -> None:
        for name in disk.names(self.path):
            if _TORN.fullmatch(name):
                disk.remove(self.path / name)

    def _remove_superseded(self, step: int, keep: int) -> None:
        """Removes what the checkpoint of `step`, just saved, makes dispensable."""
        old = [f"{each:08d}" for each in self.steps[:-keep]]
        self.steps = self.steps[-keep:]
        try:
            old += [name for name in self._later() if int(_stem(name)) <= step]
            for name in old:
                self._remove(name)
        except OSError as error:
            self._log(f"could not remove {old} of {self.path}: {reason(error)}")

    def _later(self) -> list[str]:
        """Returns the checkpoints of this run that were set aside as later."""
        found = []
        for name in disk.names(self.path):
            number = _stem(name)
            if name == number + LATER and _STEP.fullmatch(number):
                with contextlib.suppress(ValueError):  # damaged since: whose is it?
                    folder = self.path / name
                    manifest = _manifest(folder, int(number))
                    if not self._differs(manifest.about):
                        found.append(name)
        return found

    def _remove(self, name: str) -> None:
        """Removes a checkpoint; it stops to count at once, even if a crash follows."""
        torn = self.path / f"{_stem(name)}{PARTIAL}"
        disk.rename(self.path / name, torn)
        disk.sync(self.path)
        disk.remove(torn)

    def _set_aside(self, step: int) -> None:
        """Renames a checkpoint, so that it no longer counts."""
        present = disk.names(self.path)
        name = f"{step:08d}"
        if step in self.steps:
            aside = f"{name}{LATER}"
            if aside in present:  # of a former start, and superseded by this one
                self._remove(aside)
            why = "later than where the run goes on; kept until it is saved again"
            self.steps.remove(step)
        else:
            aside, number = f"{name}{DAMAGED}", 1
            while aside in present:
                number += 1
                aside = f"{name}{DAMAGED}-{number}"
            self._damaged.pop(step, None)
            why = "damaged; never removed"
        disk.rename(self.path / name, self.path / aside)
        self._log(f"{self.path / name} is set aside as {aside} ({why})")

    def digest(self, step: int) -> str:
        """Returns the digest of a manifest, which has its files'; raises OSError."""
        return disk.digest(self._final(step) / MANIFEST)

    def _final(self, step: int) -> pathlib.Path:
        return self.path / f"{step:08d}"


def verified_steps(path: pathlib.Path, log: Callable[[str], None]) -> list[int]:
    """Returns the steps of any run's undamaged checkpoints, ascending; logs others."""
    good, damaged = _examine(path, lambda about: "")
    for step, damage in damaged.items():
        log(f"checkpoint of step {step} in {path} is damaged ({damage}); unused")
    return good


def about(path: pathlib.Path, step: int) -> dict[str, Any]:
    """Returns the metadata of a checkpoint; CheckpointError if it is unreadable."""
    folder = path / f"{step:08d}"
    try:
        return _manifest(folder, step).about
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot use {folder}: {reason(error)}") from None


def newest_about(path: pathlib.Path) -> dict[str, Any]:
    """Returns the metadata of the newest checkpoint that has any; {} in a new folder.

    CheckpointError if there are checkpoints, but none with metadata.
    """
    damaged = {}
    for step in reversed(_steps(path)):
        try:
            return _manifest(path / f"{step:08d}", step).about
        except (OSError, ValueError) as error:
            damaged[step] = reason(error)
    if damaged:
        raise CheckpointError(_none_usable(path, dict(sorted(damaged.items()))))
    return {}


def reason(error: Exception) -> str:
    """Shortens an error to its cause, the last part of tensorstore's long messages."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, OSError):
        return error.strerror or lines[0]
    return lines[0].rsplit(": ", 1)[-1].partition(" [")[0]


def _stem(name: str) -> str:
    """Returns the step in a checkpoint's name."""
    return name.partition(".")[0]


def _steps(path: pathlib.Path) -> list[int]:
    """Returns every step that has a final name, ascending."""
    return sorted(int(name) for name in disk.names(path) if _STEP.fullmatch(name))


def _examine(path: pathlib.Path, differs: Differs) -> tuple[list[int], dict[int, str]]:
    """Returns the good steps, and step -> damage in words of the others."""
    good, damaged = [], {}
    for step in _steps(path):
        damage = _damage(path / f"{step:08d}", step, differs)
        if damage:
            damaged[step] = damage
        else:
            good.append(step)
    return good, damaged


def _damage(folder: pathlib.Path, step: int, differs: Differs) -> str:
    """Returns why a checkpoint cannot be used, in words; empty if it can."""
    try:
        manifest = _manifest(folder, step)
        difference = differs(manifest.about)
    except OSError as error:
        return f"its manifest cannot be read: {reason(error)}"
    except ValueError as error:
        return str(error)
    if difference:
        return f"of a run with {difference}"
    for name, digest in manifest.files.items():
        try:
            if disk.digest(folder / name) != digest:
                return f"{name} differs from what was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read: {reason(error)}"
    return ""


def _none_usable(path: pathlib.Path, damaged: Mapping[int, str]) -> str:
    listed = "; ".join(f"step {step}: {damage}" for step, damage in damaged.items())
    return (
        f"{path} holds checkpoints, but none that can be used ({listed}); put the"
        " files back, or, to begin anew, move this folder away or name another"
        " workdir"
    )
