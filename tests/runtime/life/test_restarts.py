import pytest

from nebula_jax.runtime.life import restarts


def test_a_restart_costs_until_every_cluster_has_taken_a_step(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        restarts.record_first_step(folder, 1, 100.0)
    restarts.record_death(tmp_path, "a", "was killed by SIGKILL", 200.0)
    restarts.record_first_step(folders[0], 5, 207.0)
    restarts.record_first_step(folders[1], 5, 209.5)
    restarts.record_death(tmp_path, "b", "ended with status 4", 300.0)
    restarts.record_first_step(folders[1], 9, 303.0)
    found = restarts.read(tmp_path, folders)
    assert [each["seconds"] for each in found] == [pytest.approx(9.5), None]
    text = restarts.markdown({"restarts": found})
    assert restarts.markdown({}) == ""  # of an older record
    assert text == (
        "- a was killed by SIGKILL: 9.5 s until the next step\n"
        "- b ended with status 4: no step after that"
    )


def test_a_line_that_a_kill_cut_short_does_not_count(tmp_path):
    restarts.record_death(tmp_path, "a", "was killed by SIGKILL", 200.0)
    with (tmp_path / restarts.DEATHS).open("a") as stream:
        stream.write('{"cluster": "b", "ho')
    assert len(restarts.read(tmp_path, [])) == 1
