import concurrent.futures
import re
import stat

import pytest

from nebula_jax import errors
from nebula_jax.runtime.ranks import rendezvous

LONG = "0123456789" * 4


def test_the_first_process_makes_it_for_this_user_alone(tmp_path):
    folder = tmp_path / "run"
    secret = rendezvous.secret_of_run(folder)
    path = folder / "cluster.key"
    assert len(secret) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert rendezvous.secret_of_run(folder) == secret
    assert rendezvous.secret_of_run(tmp_path / "other") != secret
    assert [each.name for each in folder.iterdir()] == ["cluster.key"]


def test_of_processes_that_start_at_once_all_get_the_same(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: rendezvous.secret_of_run(tmp_path), range(32)))
    assert len(set(found)) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.key"]


def test_one_of_the_environment_needs_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET_VARIABLE, LONG)
    assert rendezvous.secret_of_run(tmp_path / "none") == LONG.encode()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(rendezvous.SECRET_VARIABLE, "guess me")
    with pytest.raises(errors.SettingsError, match="has 8 characters; 32 random ones"):
        rendezvous.secret_of_run(tmp_path)


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o644, LONG, "others can use it (mode 0644): chmod 600"),
        (0o600, "\n", "cluster.key: holds no secret; delete it"),
    ],
)
def test_one_that_others_can_read_or_that_is_none_is_refused(
    tmp_path, mode, text, words
):
    path = tmp_path / rendezvous.SECRET_FILE
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        rendezvous.secret_of_run(tmp_path)


def test_a_folder_that_cannot_hold_it_is_named_with_the_other_way(tmp_path):
    (tmp_path / "file").touch()
    words = "workdir: .*file.* or give all processes .* same NEBULA_CLUSTER_KEY"
    with pytest.raises(errors.SettingsError, match=words):
        rendezvous.secret_of_run(tmp_path / "file")
