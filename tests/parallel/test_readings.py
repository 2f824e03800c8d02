"""Clock readings that a run keeps, and those that it takes from its file."""

from nebula_jax.parallel import readings


def test_a_run_that_goes_on_takes_what_was_kept(tmp_path):
    path = tmp_path / "readings.jsonl"
    first = readings.Readings(path)
    first.resume(is_new=True)
    assert not path.exists()
    assert first.of(2, 0.5) == 0.5
    first.write([2.0, 1.0, 0.5])
    first.write([4.0, 1.0, 0.25])
    with path.open("a") as file:
        file.write("\n[6.0, 0.")  # of a process that was killed
    second = readings.Readings(path)
    second.resume(is_new=False)
    assert [second.of(step, 9.0) for step in (2, 4, 6)] == [0.5, 0.25, 9.0]
    before = path.read_text()
    second.write([2.0, 1.0, 9.0])
    assert path.read_text() == before
    second.write([6.0, 1.0, 9.0])
    third = readings.Readings(path)
    third.resume(is_new=False)
    assert third.of(6, 1.0) == 9.0


def test_readings_of_an_attempt_that_saved_nothing_do_not_count(tmp_path):
    path = tmp_path / "readings.jsonl"
    readings.Readings(path).write([2, 0.5])
    anew = readings.Readings(path)
    anew.resume(is_new=True)
    assert anew.of(2, 7.0) == 7.0
    anew.write([4, 0.75])
    later = readings.Readings(path)
    later.resume(is_new=False)
    assert later.of(2, 7.0) == 7.0
    assert later.of(4, 7.0) == 0.75


def test_without_a_file_nothing_is_kept():
    found = readings.Readings(None)
    found.resume(is_new=False)
    found.write([1, 0.5])
    assert found.of(1, 0.25) == 0.25
