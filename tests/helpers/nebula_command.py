"""The command `nebula` on the folder of a lab, in this process."""

import atexit
import contextlib
import functools
import io
import os
import pathlib
import pwd
import shutil
import sys
import tempfile
import types
from typing import NamedTuple
from unittest import mock

import tiny_accounts

from nebula_jax import disk
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.membership import site_folder
from scripts import nebula


class Result(NamedTuple):
    """What a command has printed, and its exit status."""

    status: int
    out: str
    err: str


class Lab:
    """The folder of lab-s, which has founded a federation."""

    def __init__(self, path):
        shutil.copytree(_template(), path, symlinks=True)
        self.path, self.folder = path, site_folder.Folder(path)

    def __call__(self, *argv, stdin="", status=0):
        """Runs a command; fails unless its exit status is the one expected."""
        found = run(*argv, "--federation", self.path, stdin=stdin)
        expected = status if isinstance(status, tuple) else (status,)
        assert found.status in expected, found
        return found

    def fails(self, *argv, stdin=""):
        """Runs a command that fails with one line; the line."""
        found = self(*argv, stdin=stdin, status=(1, 2))  # 2: what was given is bad
        assert found.err.startswith("error: "), found
        assert found.err.count("\n") == 1, found
        return found.err

    def kinds(self):
        """The kinds of the entries of the audit log."""
        return [each.kind for each in audit_entries.read(self.folder.audit)]


def run(*argv, stdin=""):
    """Runs a command with a text on its standard input. The host has users for all
    accounts. Nothing is flushed: it takes most of the time, and no test cuts power."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        mock.patch.object(pwd, "getpwnam", _user),
        mock.patch.object(disk, "sync"),
        mock.patch.object(os, "fdatasync"),
        mock.patch.object(os, "fsync"),
    ):
        try:
            status = nebula.main([str(each) for each in argv])
        except SystemExit as error:
            status = error.code
    return Result(status, out.getvalue(), err.getvalue())


def _user(name):
    return types.SimpleNamespace(pw_uid=tiny_accounts.USERS[name])


@functools.cache
def _template():
    path = pathlib.Path(tempfile.mkdtemp(prefix="nebula_command_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    made = run("init", "--name", "lab-s", "--federation", path / "lab")
    assert made.status == 0, made
    return path / "lab"
