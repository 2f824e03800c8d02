"""Folders and files that this user alone can use: made so, and refused if not so.

The owner and the mode of a path are checked without following a link at it: whoever
may put a link there would otherwise choose what is read or written.
"""

import contextlib
import fcntl
import os
import pathlib
import resource
import shlex
import stat
import time
from collections.abc import Iterator

from nebula_jax import errors, files

MOST_BYTES = 2**16  # a secret is a line; a longer file was given by mistake
LOCK_SECONDS = 10.0  # others hold a lock for milliseconds, unless they are stopped
_POLL_SECONDS = 0.002


class PrivateFileError(errors.NebulaError):
    """A folder or a file that others can use, or that is not what it has to be."""


class LockedError(PrivateFileError):
    """A lock that another process or thread has."""


def folder(path: pathlib.Path) -> pathlib.Path:
    """Makes a folder for this user alone, unless it is there; returns the same path.

    Raises PrivateFileError if it cannot be made, is a link or a file, belongs to
    another user or is open to one.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
        found = path.lstat()
    except OSError as error:
        raise PrivateFileError(f"{path}: cannot be made: {error.strerror}") from None
    _check(path, found, is_folder=True)
    return path


def read(path: pathlib.Path, most: int = MOST_BYTES) -> str:
    """Reads the text of a file, of at most `most` bytes, that is this user's own.

    Raises PrivateFileError if it is missing, is a link or a folder, belongs to another
    user or is open to one; or if it is no short text.
    """
    try:
        # A pipe in the file's place must not stop the process.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as stream:
            _check(path, os.fstat(stream.fileno()), is_folder=False)
            contents = stream.read(most + 1)
    except OSError as error:
        raise PrivateFileError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = contents.decode("utf-8")
    except UnicodeDecodeError:
        raise PrivateFileError(f"{path}: is no text") from None
    if len(contents) > most:
        raise PrivateFileError(f"{path}: has more than {most} bytes")
    return text


def write(path: pathlib.Path, text: str) -> None:
    """Writes a text whole, or raises PrivateFileError; nobody else can ever read it."""
    try:
        with files.writing(path) as partial:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(partial, flags, 0o600), "wb") as stream:
                stream.write(text.encode("utf-8"))
    except OSError as error:
        raise PrivateFileError(f"{path}: cannot be written: {error.strerror}") from None


def lock(path: pathlib.Path) -> int:
    """Takes a lock that one process, and one thread of it, has at a time.

    Returns a descriptor, which gives the lock back when closed. Raises LockedError if
    another has it for LOCK_SECONDS, PrivateFileError if it cannot be made.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise PrivateFileError(f"{path}: cannot be made: {error.strerror}") from None
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise LockedError(
                    f"{path}: another process has had this lock for"
                    f" {LOCK_SECONDS:g} s; is it stopped?"
                ) from None
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Has a lock while the block runs; see `lock`."""
    descriptor = lock(path)
    try:
        yield
    finally:
        os.close(descriptor)


def keep_out_of_core_dumps() -> None:
    """Lets a crash of this process, which has keys in its memory, write none.

    Nor give one to a program: where core_pattern is a pipe, Linux minds no limit but
    that of 1 byte (fs/coredump.c), which is too short for a file as well.
    """
    most = int(resource.getrlimit(resource.RLIMIT_CORE)[1] != 0)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def check_mode(path: pathlib.Path, found: os.stat_result) -> None:
    """Raises PrivateFileError, with what mends it, if others can use a path."""
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        right = "700" if stat.S_ISDIR(found.st_mode) else "600"
        raise PrivateFileError(
            f"{path}: others can use it (mode {mode:04o}):"
            f" chmod {right} {shlex.quote(str(path))}"
        )


def _check(path: pathlib.Path, found: os.stat_result, is_folder: bool) -> None:
    what = "folder" if is_folder else "file"
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(found.st_mode):
        raise PrivateFileError(
            f"{path}: a {what} has to be here, and no link: move it away"
        )
    if found.st_uid != os.geteuid():
        raise PrivateFileError(
            f"{path}: belongs to user {found.st_uid}, not to this one"
            f" ({os.geteuid()}): run as its owner"
        )
    check_mode(path, found)
