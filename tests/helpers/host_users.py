"""Other users of the host of a lab, whom its switch knows from the kernel.

A test is one user. So the socket of another one has a name that says whose it is, and
the kernel's answer about that socket (SO_PEERCRED) is made of it.
"""

import os
import pathlib
import secrets
import shutil
import socket
import struct
import threading
import types

import tiny_accounts

from nebula_jax.federation import inner
from nebula_jax.security.membership import site_folder

_MARK = b"\0user-"
_real_user_of = inner.user_of


def folder_of(monkeypatch, running, path, name):
    """The folder of a user with an account, as SECURITY.md has it made."""
    home = running.folder.path
    path.mkdir(mode=0o700)
    shutil.copy(home / "federation.json", path)
    shutil.copytree(
        home / "trainers",
        path / "trainers",
        symlinks=True,
        ignore=shutil.ignore_patterns("epochs"),
    )
    made = site_folder.Folder(path)
    made.socket.symlink_to(running.switch.socket)
    _become(monkeypatch, made, tiny_accounts.USERS[name])
    return made


def _become(monkeypatch, folder, uid):
    """Has the requests of a folder be those of a user."""
    request, connected = inner.request, inner._connected
    asking = threading.local()

    def request_as(at, *args, **fields):
        asking.uid = uid if at.path == folder.path else getattr(asking, "uid", None)
        try:
            return request(at, *args, **fields)
        finally:
            asking.uid = None

    def connected_as(address, seconds):
        if getattr(asking, "uid", None) != uid:
            return connected(address, seconds)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(seconds)
        sock.bind(_MARK + str(uid).encode() + b"-" + secrets.token_bytes(8))
        with inner._short(pathlib.Path(address.host)) as short:
            sock.connect(short)
        return sock

    monkeypatch.setattr(inner, "request", request_as)
    monkeypatch.setattr(inner, "_connected", connected_as)
    monkeypatch.setattr(inner, "user_of", _user_of)


def _user_of(sock):
    """The real function, to which the kernel answers of whom the socket's name is."""
    name = sock.getpeername()
    if not (isinstance(name, bytes) and name.startswith(_MARK)):
        return _real_user_of(sock)
    uid = int(name.removeprefix(_MARK).split(b"-")[0])

    def answered(*asked):
        assert asked == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.pack("iII", os.getpid(), uid, os.getegid())

    return _real_user_of(types.SimpleNamespace(getsockopt=answered))
