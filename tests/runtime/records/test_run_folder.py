import pytest

from nebula_jax import errors
from nebula_jax.runtime.records import run_folder


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_is_no_folder_and_that_is_a_bad_setting(tmp_path, below):
    path = tmp_path / "file"
    path.write_text("")
    words = "cannot work in .*file.*: (File exists|Not a directory); name another workd"
    with (
        pytest.raises(errors.SettingsError, match=words),
        run_folder.lock(path / below),
    ):
        pass


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_start_that_is_refused_leaves_nothing_that_it_made(tmp_path, has_begun):
    folder = tmp_path / "runs" / "x"
    refused = pytest.raises(errors.SettingsError)
    with refused, run_folder.lock(folder), run_folder.lock(folder / "front"):
        (folder / "run.flags").write_text("") if has_begun else None
        raise errors.SettingsError("no")
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == ({"runs", "x", "run.flags", ".lock"} if has_begun else set())


def test_a_folder_is_of_one_process_at_a_time(tmp_path):
    folder = tmp_path / "new" / "run"
    with run_folder.lock(folder):
        refused = pytest.raises(errors.NebulaError, match="another process works in")
        with refused, run_folder.lock(folder):
            pass
    with run_folder.lock(folder):  # free again
        pass
