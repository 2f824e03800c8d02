import os

import pytest

from nebula_jax import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_half_way(path):
    with files.writing(path) as partial:
        partial.write_text("half")
        raise OSError("disk full")


def write_folder(path, name):
    before = names(path)
    with files.writing(path) as partial:
        partial.mkdir()
        (partial / name).write_text(name)
        assert names(path) == before


def test_a_digest_of_values_differs_wherever_they_differ():
    values = ["a", 1, [2, None]]
    assert files.digest_of(values) == files.digest_of(list(values))
    assert len(files.digest_of(values)) == 12
    for other in (["a", 1, [2, 3]], ["a", "1", [2, None]], ["a", 1], []):
        assert files.digest_of(other) != files.digest_of(values)


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with files.writing(path) as partial:
        assert partial.name == path.name
        partial.write_text("half")
        assert not path.exists()
        partial.write_text("whole")
    assert path.read_text() == "whole"
    assert names(path.parent) == ["file.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_file_that_fails_half_way_leaves_what_was_there(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("before")
    with pytest.raises(OSError, match="disk full"):
        fail_half_way(path)
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file.txt"]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()  # empty: it may be replaced
    write_folder(path, "a")
    assert names(path) == ["a"]
    with pytest.raises(OSError, match="not empty"):
        write_folder(path, "b")
    assert names(path) == ["a"]
    assert names(tmp_path) == ["folder"]


def replace(path, content, messages):
    with files.replacing(path, messages.append) as new:
        (new / "deep").mkdir(parents=True)
        (new / "deep" / "a").write_text(content)


def test_a_folder_that_is_replaced_is_kept_if_it_differs(tmp_path):
    path, messages = tmp_path / "folder", []
    for content in ("1", "1", "2", "2", "3"):
        replace(path, content, messages)
        assert (path / "deep" / "a").read_text() == content
    assert names(tmp_path) == ["folder", "folder.former", "folder.former-2"]
    assert (tmp_path / "folder.former" / "deep" / "a").read_text() == "1"
    assert (tmp_path / "folder.former-2" / "deep" / "a").read_text() == "2"
    assert messages == [
        f"{path}: what was there differs; it is kept as folder.former",
        f"{path}: what was there differs; it is kept as folder.former-2",
    ]
    (path / "notes").write_text("mine")
    replace(path, "3", messages)
    assert (tmp_path / "folder.former-3" / "notes").read_text() == "mine"
