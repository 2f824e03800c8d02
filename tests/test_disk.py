import hashlib
import os

import pytest

from nebula_jax import disk


@pytest.fixture
def synced(monkeypatch):
    """The inodes that were flushed."""
    found, fsync = [], os.fsync

    def record(descriptor):
        found.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return found


def inode(path):
    return path.stat().st_ino


def test_a_folder_that_is_made_is_durable_with_those_around_it(tmp_path, synced):
    disk.make_folder(tmp_path / "a" / "b")
    disk.make_folder(tmp_path / "a" / "b")
    assert synced == [inode(tmp_path), inode(tmp_path / "a")]


def test_all_that_is_in_a_folder_is_flushed(tmp_path, synced):
    disk.make_folder(tmp_path / "a" / "b")
    disk.write(tmp_path / "a" / "b" / "file", b"data")
    synced.clear()
    disk.sync_all(tmp_path / "a")
    inside = [tmp_path / "a" / "b" / "file", tmp_path / "a" / "b", tmp_path / "a"]
    assert synced == [inode(path) for path in inside]


def test_files_and_names_are_sorted_and_relative(tmp_path):
    for name in ("b/c/d", "b/a", "e"):
        disk.make_folder((tmp_path / name).parent)
        disk.write(tmp_path / name, name.encode())
    assert disk.files(tmp_path) == ["b/a", "b/c/d", "e"]
    assert disk.names(tmp_path) == ["b", "e"]
    assert disk.names(tmp_path / "nowhere") == []
    assert disk.read(tmp_path / "e") == b"e"
    assert disk.digest(tmp_path / "e") == hashlib.sha256(b"e").hexdigest()
    with pytest.raises(NotADirectoryError):
        disk.names(tmp_path / "e")


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path):
    disk.make_folder(tmp_path / "mine")
    disk.write(tmp_path / "mine" / "file", b"data")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    disk.make_folder(tmp_path / "folder" / "deep")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "mine")
    disk.remove(tmp_path / "link")
    disk.remove(tmp_path / "folder")
    assert disk.names(tmp_path) == ["mine"]
    assert disk.names(tmp_path / "mine") == ["file"]
    disk.remove(tmp_path / "mine" / "file")
    assert disk.names(tmp_path / "mine") == []
