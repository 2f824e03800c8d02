import json

import numpy as np
import pytest

from nebula_jax import disk, errors
from nebula_jax.training import metrics


def opened(folder, step, messages=None):
    return metrics.MetricsLog(
        folder, step, [].append if messages is None else messages.append
    )


def written(folder, *steps):
    """A log with a record for each step."""
    log = opened(folder, 0)
    for step in steps:
        log.write(step, {"loss": 1.0 / step})
    log.close()
    return folder / "metrics.jsonl"


def steps(folder):
    return [record["step"] for record in metrics.read(folder)]


def test_records_are_written_read_and_continued_without_doubling(tmp_path):
    written(tmp_path, 10, 20, 30)
    log = opened(tmp_path, 20)
    log.write(30, {"loss": 0.5, "auc": {"en": 0.6, "sw": 0.7}})
    log.close()
    records = metrics.read(tmp_path)
    assert [record["step"] for record in records] == [10, 20, 30]
    assert records[-1]["loss"] == 0.5
    assert records[-1]["auc"] == {"en": 0.6, "sw": 0.7}
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("step", [0, 10, 20])
def test_no_line_is_ever_lost(tmp_path, step):
    """Those of later steps, which come again, are in a file of their own."""
    path = written(tmp_path, 10, 20, 30)
    before = path.read_bytes().splitlines()
    events = sorted(tmp_path.glob("events.out.tfevents.*"))
    opened(tmp_path, step).close()
    after = path.read_bytes().splitlines()
    assert after == before[: step // 10]
    aside = (tmp_path / "metrics.aside.jsonl").read_bytes().splitlines()
    assert after + aside == before
    assert all(each.is_file() for each in events)
    opened(tmp_path, 30).close()
    assert (tmp_path / "metrics.aside.jsonl").read_bytes().splitlines() == aside


def test_of_two_equal_lines_none_is_lost(tmp_path):
    path = written(tmp_path, 10, 20)
    line = path.read_bytes().splitlines()[1]
    path.write_bytes(path.read_bytes() + line + b"\n")
    opened(tmp_path, 10).close()
    aside = (tmp_path / "metrics.aside.jsonl").read_bytes().splitlines()
    assert aside == [line, line]


@pytest.mark.parametrize(
    ("line", "damage"),
    [
        *((0, b'{"step": 20, "lo'), (1, b"3"), (2, b"[]")),
        *((0, b'{"loss": 1}'), (1, b"\xff\xfe"), (2, b"[" * 100_000)),
    ],
)
def test_a_damaged_line_is_named_and_costs_no_other(tmp_path, line, damage):
    path = written(tmp_path, 10, 20, 30)
    lines = path.read_bytes().splitlines()
    lines[line] = damage
    path.write_bytes(b"\n".join(lines))
    others = [step for step in (10, 20, 30) if step != 10 * (line + 1)]
    assert steps(tmp_path) == others
    messages = []
    log = opened(tmp_path, 30, messages)
    log.write(40, {"loss": 1})
    assert steps(tmp_path) == [*others, 40]
    assert messages == [f"{path}: 1 damaged lines are set aside in metrics.aside.jsonl"]
    assert (tmp_path / "metrics.aside.jsonl").read_bytes() == damage + b"\n"


def test_a_last_line_without_its_end_does_not_run_into_the_next(tmp_path):
    path = written(tmp_path, 10)
    path.write_bytes(path.read_bytes().rstrip())
    log = opened(tmp_path, 10)
    log.write(20, {"loss": 1})
    assert steps(tmp_path) == [10, 20]


def test_a_crash_while_it_is_rewritten_loses_nothing(tmp_path, monkeypatch):
    path = written(tmp_path, 10, 20, 30)
    before = path.read_bytes()

    def crash(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path, 10)
    assert path.read_bytes() == before


def test_a_full_disk_is_one_error(tmp_path, monkeypatch):
    log = opened(tmp_path, 0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(errors.NebulaError, match="No space left on device"):
        log.write(1, {"loss": 1})
    with pytest.raises(errors.NebulaError, match=r"cannot write .*/metrics\.jsonl"):
        opened(tmp_path / "metrics.jsonl", 1)


def test_numbers_that_are_not_finite_are_null_and_read_as_nan(tmp_path):
    log = opened(tmp_path, 0)
    log.write(10, {"loss": float("nan"), "auc": {"en": float("-inf"), "sw": 0.5}})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["loss"] is None
    assert record["auc"] == {"en": None, "sw": 0.5}
    (record,) = metrics.read(tmp_path)
    assert np.isnan([record["loss"], record["auc"]["en"]]).all()


RECORD = {
    "step": 40,
    "loss": 9.5,
    "rtd_loss": 0.21,
    "clm_loss": 7.0,
    "accuracy": 0.5,
    "tokens_per_second": 1943.4,
    "steps_per_second": 2.0,
    "seconds_left": 40.0,
    "bytes_sent": 1000,
    "bytes_received": 10,
    "sent_mbit": 12.34,
    "received_mbit": 0.04,
    "waiting_share": 0.41,
    "waiting_for": {"generator:0": 0.1, "generator:1": 0.31},
    "round_trip": {"generator:0": 0.0302, "generator:1": 0.0101},
}


def test_a_line_says_where_a_run_is_and_what_holds_it_up():
    line = metrics.progress_line("discriminator", 120, RECORD)
    for words in (
        "discriminator step     40/120  33%",
        "left 40 s",
        "loss   9.5000  rtd_loss   0.2100  clm_loss   7.0000",
        "1,943 tokens/s",
        "sends 12.3, gets 0.0 Mbit/s",
        "round trip 30 ms",
        "waited  41% for generator:1",
    ):
        assert words in line
    assert "accuracy" not in line


def test_a_line_leaves_out_what_is_not_known():
    alone = {
        name: 0
        for name in (
            "tokens_per_second",
            "bytes_sent",
            "bytes_received",
            "waiting_share",
        )
    }
    line = metrics.progress_line(
        "whole", 0, {"step": 3, "steps_per_second": 2.5} | alone
    )
    assert " ".join(line.split()) == "whole step 3 2.50 steps/s waited 0%"


def test_the_newest_record_of_steps_is_found_at_the_end(tmp_path, monkeypatch):
    assert metrics.newest(tmp_path) == {}
    log = opened(tmp_path, 0)
    for step in (10, 20):
        log.write(step, {"steps_per_second": 1.0, "loss": float("nan")})
    log.write(20, {"held_out_auc": {"en": 0.5}})
    log.close()
    monkeypatch.setattr(metrics, "NEWEST_BYTES", 200)  # begins within a line
    found = metrics.newest(tmp_path)
    assert (found["step"], found["steps_per_second"]) == (20, 1.0)
    assert np.isnan(found["loss"])
