import pytest

from nebula_jax import errors
from nebula_jax.runtime.records import run_folder


def test_a_cluster_has_a_folder_of_its_own(tmp_path):
    assert run_folder.of_cluster(tmp_path, "generator:0") == tmp_path / "generator-0"


def test_a_folder_is_of_one_process_at_a_time(tmp_path):
    folder = tmp_path / "new" / "run"
    with run_folder.lock(folder):
        refused = pytest.raises(errors.NebulaError, match="another process works in")
        with refused, run_folder.lock(folder):
            pass
    with run_folder.lock(folder):  # free again
        pass
