"""Folders and files of this user alone."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from nebula_jax.security import private_files
from nebula_jax.security.private_files import PrivateFileError


def test_a_folder_is_made_for_this_user_whatever_the_mask(tmp_path):
    mask = os.umask(0)
    try:
        found = private_files.folder(tmp_path / "new")
    finally:
        os.umask(mask)
    assert found.stat().st_mode & 0o777 == 0o700
    assert private_files.folder(found) == found


def refused(path, words):
    with pytest.raises(PrivateFileError, match=re.escape(words)) as why:
        private_files.folder(path)
    assert str(path) in str(why.value)


def test_what_is_no_folder_of_ours(tmp_path, monkeypatch):
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(tmp_path)
    file.write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for wrong in (link, file, tmp_path / "dangling"):
        refused(wrong, "a folder has to be here, and no link")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "open").mkdir(mode=0o755)
    refused(tmp_path / "open", "others can use it (mode 0755): chmod 700")
    refused(tmp_path / "a" / "b", "cannot be made: No such file")
    monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 1)
    refused(tmp_path, "belongs to user")


def test_a_file_is_written_for_this_user_and_read(tmp_path):
    path, mask = tmp_path / "secret", os.umask(0)
    try:
        for text in ("one\n", "é two\n"):
            private_files.write(path, text)
            assert private_files.read(path) == text
            assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(mask)
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_what_is_no_file_of_ours(tmp_path, monkeypatch):
    good = tmp_path / "good"
    private_files.write(good, "secret")
    (tmp_path / "link").symlink_to(good)
    modes = {f"open {mode:o}": mode for mode in (0o644, 0o640, 0o620, 0o602, 0o601)}
    for name, mode in modes.items():
        (tmp_path / name).write_text("secret")
        (tmp_path / name).chmod(mode)
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name, contents in (("bytes", b"\xff"), ("long", b"a" * (2**16 + 1))):
        (tmp_path / name).write_bytes(contents)
        (tmp_path / name).chmod(0o600)
    for name, words in {
        "link": "cannot be read",
        **dict.fromkeys(modes, "chmod 600"),
        "pipe": "a file has to be here",
        "bytes": "is no text",
        "long": "more than 65536 bytes",
        "nowhere": "No such file",
        "folder": "cannot be read: Is a directory",
    }.items():
        with pytest.raises(PrivateFileError, match=words) as why:
            private_files.read(tmp_path / name)
        assert str(tmp_path / name) in str(why.value)
    with pytest.raises(PrivateFileError, match="cannot be written"):
        private_files.write(tmp_path / "good" / "inside", "text")
    monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PrivateFileError, match="run as its owner"):
        private_files.read(good)


def test_one_thread_at_a_time_has_a_lock(tmp_path, monkeypatch):
    path, order = tmp_path / "lock", []

    def enter():
        with private_files.locked(path):
            order.append("second")

    with private_files.locked(path):
        other = threading.Thread(target=enter)
        other.start()
        time.sleep(0.05)
        order.append("first")
    other.join(5)
    assert order == ["first", "second"]
    monkeypatch.setattr(private_files, "LOCK_SECONDS", 0.05)
    with (
        private_files.locked(path),
        pytest.raises(private_files.LockedError, match=r"for 0\.05 s; is it stopped"),
    ):
        private_files.lock(path)
    os.close(private_files.lock(path))
    with pytest.raises(PrivateFileError, match="cannot be made"):
        private_files.lock(tmp_path / "missing" / "lock")


def test_a_crash_leaves_no_memory_behind(tmp_path):
    """Neither in a file, nor to a program: that is not bound by a limit of 0."""
    crash = "private_files.keep_out_of_core_dumps(); print(flush=True); os.abort()"
    script = f"import os; from nebula_jax.security import private_files; {crash}"
    died = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert (died.returncode, died.stdout) == (-signal.SIGABRT, b"\n")
    assert not list(tmp_path.iterdir())
