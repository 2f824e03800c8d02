import json
import os

import pytest

from nebula_jax.security import incarnations


def begin(folder, cluster="generator:0"):
    return incarnations.Incarnations(folder, "m3", cluster)


def test_each_start_is_one_more(tmp_path):
    first = begin(tmp_path)
    first.close()
    for number in (1, 2, 3):
        made = begin(tmp_path)
        assert made.own == first.own + number
        made.close()


def test_who_has_lost_its_numbers_is_no_older_copy(tmp_path):
    """It has joined again, in another folder: its peers have seen few starts."""
    for path in (tmp_path / "first", tmp_path / "first", tmp_path / "other"):
        made = begin(path)
        made.close()
    peer = incarnations.Incarnations(tmp_path / "peer", "m3", "discriminator")
    peer.admit("generator:0 of lab-t", 1000)
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
    made.admit("discriminator of lab-t", 4)
    made.admit("discriminator of lab-t", 4)  # it has only reconnected
    made.admit("discriminator of lab-u", 1)
    made.close()
    made = begin(tmp_path)
    with pytest.raises(incarnations.IncarnationError, match="incarnation 3 after 4"):
        made.admit("discriminator of lab-t", 3)
    made.admit("discriminator of lab-t", 5)
    made.close()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"own": 1}', '{"own": "1", "peers": {}}']
)
def test_numbers_that_cannot_be_read_are_not_begun_anew(tmp_path, text):
    made = begin(tmp_path)
    made.close()
    (path,) = tmp_path.rglob("*.json")
    json.loads(path.read_text())
    path.write_text(text)
    with pytest.raises(incarnations.IncarnationError, match="cannot be read"):
        begin(tmp_path)
