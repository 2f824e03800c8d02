import os
import shutil
import stat

import pytest

from nebula_jax.security import incarnations, store

SHOWN = [incarnations.shown(number) for number in range(7)]


def number_of(shown):
    return shown >> incarnations.SALT_BITS


def begin(folder, cluster="generator:0"):
    return incarnations.Incarnations(folder, "m3", cluster)


def test_each_start_is_one_more(tmp_path):
    first = begin(tmp_path)
    first.close()
    for number in (1, 2, 3):
        made = begin(tmp_path)
        assert number_of(made.own) == number_of(first.own) + number
        made.close()


def test_who_has_lost_its_numbers_is_no_older_copy(tmp_path):
    """It has joined again, in another folder: its peers have seen few starts."""
    for path in (tmp_path / "first", tmp_path / "first", tmp_path / "other"):
        made = begin(path)
        made.close()
    peer = incarnations.Incarnations(tmp_path / "peer", "m3", "discriminator")
    peer.admit("generator:0 of lab-t", incarnations.shown(1000))
    peer.admit("generator:0 of lab-t", made.own)
    peer.close()


def test_a_trainer_that_runs_already_is_refused(tmp_path, monkeypatch):
    made = begin(tmp_path)
    with pytest.raises(incarnations.IncarnationError, match="runs here already"):
        begin(tmp_path)
    begin(tmp_path, "generator:1").close()
    made.close()
    begin(tmp_path).close()
    with monkeypatch.context() as counting:
        closed = []
        counting.setattr(os, "close", closed.append)
        made.close()  # again: its descriptor may be another file's by now
    assert not closed


def test_a_peer_whose_number_goes_back_is_refused_after_a_restart_too(tmp_path):
    made = begin(tmp_path)
    made.admit("discriminator of lab-t", SHOWN[4])
    made.admit("discriminator of lab-t", SHOWN[4])  # it has only reconnected
    made.admit("discriminator of lab-u", SHOWN[1])
    made.close()
    made = begin(tmp_path)
    with pytest.raises(incarnations.IncarnationError, match="incarnation 3 after 4"):
        made.admit("discriminator of lab-t", SHOWN[3])
    made.admit("discriminator of lab-t", SHOWN[5])
    made.close()


@pytest.mark.parametrize("change", ["", "{}", "9"])
def test_numbers_that_cannot_be_read_are_not_begun_anew(tmp_path, change):
    made = begin(tmp_path)
    made.close()
    (path,) = tmp_path.rglob("*.json")
    path.write_text(path.read_text().replace("1", change, 1) if change else "")
    for _ in range(2):
        with pytest.raises(store.StoreError, match="the file is damaged"):
            begin(tmp_path)


def test_of_two_clones_that_have_started_as_often_one_is_refused(tmp_path):
    """Copies of one folder, or of one machine; they would take turns."""
    begin(tmp_path / "a").close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    clones = [begin(tmp_path / each) for each in ("a", "b")]
    peer = incarnations.Incarnations(tmp_path / "peer", "m3", "discriminator")
    peer.admit("generator:0 of lab-t", clones[0].own)
    with pytest.raises(incarnations.IncarnationError, match="or runs twice"):
        peer.admit("generator:0 of lab-t", clones[1].own)
    peer.admit("generator:0 of lab-t", clones[0].own)  # it has only reconnected
    for each in (*clones, peer):
        each.close()


def test_a_lab_that_makes_up_names_fills_no_disk(tmp_path):
    made = begin(tmp_path)
    with made._store.changing() as tables:
        for number in range(incarnations.MOST_OF_LAB):
            tables["peers"][f"c{number} of lab-t"] = SHOWN[1]
    with pytest.raises(incarnations.IncarnationError, match="no more are taken"):
        made.admit("other of lab-t", SHOWN[1])
    made.admit("c1 of lab-t", SHOWN[2])
    made.admit("other of lab-u", SHOWN[1])
    made.close()


def test_folders_that_are_missing_are_made_for_this_user_alone(tmp_path):
    incarnations.Incarnations(tmp_path / "epochs", "m3/a", "generator:0").close()
    made = [each for each in (tmp_path / "epochs").glob("**") if each.is_dir()]
    assert len(made) == 2
    assert {stat.S_IMODE(each.stat().st_mode) for each in made} == {0o700}
