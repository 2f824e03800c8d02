"""The command `nebula` on the folder of a lab, in this process."""

import atexit
import contextlib
import functools
import io
import os
import pathlib
import shutil
import sys
import tempfile
from typing import NamedTuple
from unittest import mock

import tiny_accounts

from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.membership import site_folder
from scripts import nebula

PASSWORD = "correct horse battery"
TOKENS = ("owner.token", "users/*/token")


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

    def add(self, name, role="researcher"):
        """Adds an account, and logs it in."""
        self("account", "add", name, "--role", role, stdin=f"{PASSWORD}\n")
        self("login", name, stdin=f"{PASSWORD}\n")

    def kinds(self):
        """The kinds of the entries of the audit log."""
        return [each.kind for each in audit_entries.read(self.folder.audit)]

    def secrets(self):
        """Every token in the folder."""
        files = [path for each in TOKENS for path in self.path.glob(each)]
        return [path.read_text().strip() for path in files]


def run(*argv, stdin=""):
    """Runs a command with a text on its standard input.

    Hashes of passwords are cheap, and nothing is flushed to the disk: no test cuts the
    power, and it takes most of the time.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        mock.patch("argon2.PasswordHasher", tiny_accounts.Hasher),
        tiny_accounts._no_power_cut(),
        mock.patch.object(os, "fdatasync"),
        mock.patch.object(os, "fsync"),
    ):
        try:
            status = nebula.main([str(each) for each in argv])
        except SystemExit as error:
            status = error.code
    return Result(status, out.getvalue(), err.getvalue())


@functools.cache
def _template():
    path = pathlib.Path(tempfile.mkdtemp(prefix="nebula_command_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    made = run("init", "--name", "lab-s", "--federation", path / "lab")
    assert made.status == 0, made
    return path / "lab"
