import pytest

from nebula_jax.training import metrics


def test_records_are_written_read_and_continued_without_doubling(tmp_path):
    log = metrics.MetricsLog(tmp_path, 0)
    for step in (10, 20, 30):
        log.write(step, {"loss": 1.0 / step})
    log.close()
    log = metrics.MetricsLog(tmp_path, 20)
    log.write(30, {"loss": 0.5, "auc": {"en": 0.6, "sw": 0.7}})
    log.close()
    records = metrics.read(tmp_path)
    assert [record["step"] for record in records] == [10, 20, 30]
    assert records[-1]["loss"] == 0.5
    assert records[-1]["auc"] == {"en": 0.6, "sw": 0.7}
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_a_torn_last_line_is_left_out(tmp_path):
    log = metrics.MetricsLog(tmp_path, 0)
    log.write(10, {"loss": 1.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 20, "lo')
    assert [record["step"] for record in metrics.read(tmp_path)] == [10]


def test_the_progress_line_says_it_all():
    line = metrics.progress_line(
        "generator:0",
        600,
        {
            "step": 120,
            "loss": 5.25,
            "tokens_per_second": 12_345.6,
            "bytes_sent": 1_234_567,
            "waiting_share": 0.125,
        },
    )
    for part in (
        "generator:0",
        "120/600",
        "5.2500",
        "12,346 tokens/s",
        "1.2 MB",
        "12%",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3e12, "3000.0 GB")],
)
def test_bytes_are_said_in_units(count, text):
    assert metrics.in_bytes(count) == text
