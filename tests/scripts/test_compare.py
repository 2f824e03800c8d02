"""Two runs beside each other, made of the files that runs leave."""

import pytest

from nebula_jax.runtime.records import report
from nebula_jax.training import metrics
from scripts import compare


@pytest.fixture
def made(tmp_path):
    """Writes a run: its folder."""

    def run(name, rate, losses, is_done=True):
        folder = tmp_path / name
        log = metrics.MetricsLog(folder / "generator-0", 0, print)
        for step, loss in enumerate(losses, 1):
            log.write(step, {"loss": loss, "sent_mbit": 1.0, "waiting_share": 0.1})
        log.write(step, {"held_out_auc": {"en": 0.5, "sw": 0.7}})
        log.close()
        if is_done:
            cluster = {
                "cluster": "generator:0",
                "last_step": len(losses),
                "seconds": 60.0,
                "tokens_per_second": 1234.0,
                "bytes_sent": 2_000_000,
                "bytes_received": 10,
                "waited_seconds": 6.0,
            }
            report.write(folder / "generator-0" / "summary.json", cluster)
            summary = {"commit": name * 3, "seconds": 90.0, "clusters": [cluster]}
            flags = {"learning_rate": rate, "steps": 3}
            report.write(folder / "summary.json", summary | {"flags": flags})
        return folder

    return run


def cells(text):
    return {
        line.split(" | ")[0].strip("| "): [
            each.strip("| ") for each in line.split(" | ")[1:]
        ]
        for line in text.splitlines()
        if line.startswith("|")
    }


def test_settings_figures_and_curves_stand_side_by_side(made, tmp_path, capsys):
    one, two = made("one", 0.1, [3.0, 2.0]), made("two", 0.2, [3.0, 1.5])
    out = tmp_path / "both.html"
    assert compare.main([str(one), str(two), f"--out={out}"]) == 0
    panels = compare.panels([compare.read(folder) for folder in (one, two)])
    (loss,) = (each.curves for each in panels if each.title == "loss")
    curves = {"one": [(1, 3.0), (2, 2.0)], "two": [(1, 3.0), (2, 1.5)]}
    assert loss == {f"{name} generator:0": curves[name] for name in curves}
    assert "one beside two" in out.read_text("utf-8")
    found = cells(capsys.readouterr().out)
    assert found["--learning_rate"] == ["0.1", "0.2"]
    assert "--steps" not in found
    assert found["commit"] == ["oneoneone", "twotwotwo"]
    assert found["generator:0: loss"] == ["2.0000", "1.5000"]
    assert found["generator:0: held_out_auc"] == ["0.6000", "0.6000"]
    assert found["generator:0: sent"] == ["2.0 MB", "2.0 MB"]
    assert found["generator:0: waited"] == ["10%", "10%"]


def test_a_run_under_way_has_what_it_has(made, capsys):
    one, two = made("one", 0.1, [3.0]), made("two", 0.1, [2.0], is_done=False)
    assert compare.main([str(one), str(two)]) == 0
    found = cells(capsys.readouterr().out)
    assert found["commit"] == ["oneoneone", "–"]
    assert found["generator-0: loss"] == ["–", "2.0000"]


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    assert compare.main([str(tmp_path)]) == 2
    assert f"{tmp_path}: no cluster of a run has metrics" in capsys.readouterr().err
