"""Makes a process's disk fail: Python imports this at its start if it is on its path.

FAILING_DISK=EIO:rename:source/checkpoints/00000008 lets the renaming to a path with
this end fail so; `fsync` likewise the syncing of such a path.
"""

import errno
import os

_name, _call, _end = os.environ["FAILING_DISK"].split(":")
_rename, _fsync = os.rename, os.fsync


def _fail(call, path):
    if call == _call and os.fspath(path).endswith(_end):
        number = getattr(errno, _name)
        raise OSError(number, os.strerror(number), os.fspath(path))


def rename(source, target, **options):
    _fail("rename", target)
    _rename(source, target, **options)


def fsync(descriptor):
    _fail("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
    _fsync(descriptor)


os.rename, os.fsync = rename, fsync
