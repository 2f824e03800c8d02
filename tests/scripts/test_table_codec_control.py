"""The table of codecs that a run chooses, from runs that a stub stands for."""

import json

import held_out_scores
import pytest

from experiments.abnet import held_out, scaled_wan
from nebula_jax import errors
from nebula_jax.communication import wan
from scripts import table_codec_control
from scripts.tables import abnet as abnet_runs
from scripts.tables import config
from scripts.tables import runs as table_runs

MEASURED = {
    "wan": "6000kbit,15.00ms",
    "factor": 1.0,
    "compute_seconds": 0.3,
    "padded_bits": 6_000_000,
    "rate": 6e6,
    "delay": 0.015,
}
WIRE = {"bf16": 1.0, "int8": 0.5, "int4": 0.25}  # seconds a step on the measured line
COMPUTE, PROBE = 0.3, 0.1
CHANGE = 41  # the first step on the line's second rate


class Stub:
    """Leaves behind what the real command would; a run that chooses goes up by one."""

    def __init__(self, changes=True):
        self.names, self._changes = [], changes

    def __call__(self, run, workdir):
        self.names.append(run.name)
        arguments = dict(
            each.removeprefix("--").split("=", 1) for each in run.arguments
        )
        is_whole, seed = arguments["cluster"] == "whole", int(arguments["seed"])
        line = arguments.get("wan", "")
        text = MEASURED["wan"] if line == scaled_wan.AUTO else line
        rate = wan.from_string(text).up.rate if text else 0.0
        is_auto = arguments["forward_codec"] == "auto"
        codec = next((name for name in WIRE if name in run.name), "bf16")
        names = ["whole"] if is_whole else ["target", "source"]
        clusters = [
            {"cluster": name, "first_step": 1, "last_step": 160} for name in names
        ]
        tape, times, now, rung = [], [], 100.0, 0
        last = int(arguments.get("steps", 160))
        for step in range(1, last + 1):
            has_changed = "@" in text and step >= CHANGE and self._changes
            if has_changed:
                rate = MEASURED["rate"]
            wire = WIRE[(codec, "int8", "int4")[rung]] * MEASURED["rate"] / (rate or 1)
            now += max(COMPUTE, wire)
            if is_auto and step % 8 == 0:
                now += PROBE
                tape.append([step, rung, rung, 1.0, 0.99, wire / COMPUTE])
                rung = min(2, rung + (wire > COMPUTE))
            times.append((step, now))
        if is_auto:
            clusters[1]["tape"] = tape
        summary = {
            "commit": "abc123",
            "seconds": 60.0,
            "clusters": clusters,
            "line": MEASURED if line == scaled_wan.AUTO else {},
            "bleu": [{"step": 160, "dev": 9.0, "test": 20.0}],
        }
        if arguments.get("held_out_pairs") != "0":
            summary["held_out"] = {"step": 160}
            scores = held_out_scores.scores(
                [number < 20 for number in range(40)], nats=10.0 + seed + 0.5 * is_auto
            )
            folder = workdir / "target" / "translations"
            folder.mkdir(parents=True)
            held_out.write(folder, 160, scores)
        (workdir / "summary.json").write_text(json.dumps(summary))
        for name in names:
            (workdir / name).mkdir(exist_ok=True)
            records = [
                {"step": step, "time": time, "loss": 5.0}
                | {"bytes_sent": 10 * step, "bytes_received": 10 * step}
                for step, time in times
            ]
            text = "".join(json.dumps(record) + "\n" for record in records)
            (workdir / name / "metrics.jsonl").write_text(text)


def run_all(folder, stub, stages=table_codec_control.STAGES):
    folder.mkdir(exist_ok=True)
    flagfile = folder / "tiny.flags"
    flagfile.write_text("--steps=160\n")
    runs = table_runs.Runs(folder / "table", abnet_runs.figures, stub)
    arguments = runs, (f"--flagfile={flagfile}",), ["0", "1"]
    table_codec_control.work(*arguments, stages)
    return runs.provenance(["0", "1"]) | table_codec_control.gather(*arguments)


def test_lines_are_slowed_in_proportion():
    ten, sixty, thousand, both = (
        table_codec_control.wan(line, MEASURED) for line in table_codec_control.LINES
    )
    assert sixty == MEASURED["wan"]
    assert ten == "1000kbit,15.00ms"
    assert thousand == "100000kbit,15.00ms"
    up = wan.from_string(both).up
    assert up.rate == 100e6
    assert up.changes == ((table_codec_control.CHANGES_AFTER, 6e6),)


def test_figures_are_the_hand_computed_ones(tmp_path):
    result = run_all(tmp_path, Stub())
    rows = {(row["line"], row["rate"]): row for row in result["rows"]}
    assert len(rows) == 5
    slow = rows["10 Mbit/s", 10.0]
    assert slow["fixed"] == pytest.approx({"bf16": 6.0, "int8": 3.0, "int4": 1.5})
    assert slow["best"] == "int4"
    found = slow["seeds"]["0"]
    # Rungs change after the probes of steps 8 and 16; steps are counted from 2.
    assert found["rungs"] == [2, 2]
    assert found["from_step"] == 17
    assert found["seconds"] == pytest.approx(1.5)
    # The last 50 steps have seven probes.
    assert found["probes"] == pytest.approx(0.7 / (50 * 1.5 + 0.7))
    fast = rows["1000 Mbit/s", 1000.0]
    assert fast["fixed"] == pytest.approx(dict.fromkeys(WIRE, COMPUTE))
    assert fast["seeds"]["1"]["rungs"] == [0, 0]
    assert fast["seeds"]["1"]["seeking"] == 0


def test_steps_after_the_last_probe_have_the_rungs_that_follow_from_it():
    tape = [[2, 0, 0, 1.0, 1.0, 2.0], [4, 1, 1, 1.0, 1.0, 2.0]]
    records = [{"step": step, "time": float(step)} for step in range(1, 7)]
    source = {"cluster": "source", "tape": tape}

    def rungs(**more):
        result = {"summary": {"clusters": [source | more]}, "records": records}
        return [step.rungs for step in table_codec_control.steps_of(result)[0]]

    before = [(0, 0), (1, 1), (1, 1)]
    assert rungs(rungs=[2, 1]) == [*before, (2, 1), (2, 1)]
    assert rungs() == [*before, (1, 1), (1, 1)]  # of a record that has no more


def test_a_line_that_changes_has_a_row_for_each_rate(tmp_path):
    result = run_all(tmp_path, Stub())
    before, after = result["rows"][-2:]
    assert [row["rate"] for row in (before, after)] == [1000.0, 60.0]
    assert before["seeds"]["0"]["rungs"] == [0, 0]
    assert "held_out" not in before
    found = after["seeds"]["0"]
    assert found["rungs"] == [2, 2]
    assert found["first_step"] == CHANGE
    assert found["from_step"] == 57
    assert found["seconds"] == pytest.approx(COMPUTE)
    # 8 steps with bf16 and 8 with int8, and two probes.
    assert found["seeking"] == pytest.approx(8 * 0.7 + 8 * 0.2 + 2 * PROBE)
    # A sentence of 5 tokens has half a nat more.
    assert after["held_out"]["difference"] == pytest.approx({"0": 0.1, "1": 0.1})
    assert after["held_out"]["bleu_difference"]["difference"] == 0


def test_a_line_that_did_not_change_is_an_error(tmp_path):
    with pytest.raises(
        errors.NebulaError, match="auto-1000-60-seed0: the line did not"
    ):
        run_all(tmp_path, Stub(changes=False))


def test_the_bars_of_the_issue_are_compared(tmp_path):
    result = run_all(tmp_path, Stub())
    assert len(result["targets"]) == 2 * len(result["rows"])
    met = {each["what"]: each["met"] for each in result["targets"]}
    assert met["s/step over the best fixed codec's (10 Mbit/s)"]
    assert met["share of probes in settled steps (10 Mbit/s)"]
    assert not met["share of probes in settled steps (1000 Mbit/s)"]  # 0.1 s in 2.4


def test_markdown_has_a_row_for_each_rate(tmp_path):
    text = table_codec_control.markdown(run_all(tmp_path, Stub()))
    assert "so 60 Mbit/s are `--wan=6000kbit,15.00ms`" in text
    assert "| 10 Mbit/s | 6.000 | 3.000 | 1.500 | 1.500 | 1.000 | int4 | 17 |" in text
    assert "| 1000, then 60 Mbit/s: at 1000 | 0.300 | 0.300 | 0.300 | 0.300 |" in text
    table_codec_control.draw(run_all(tmp_path, Stub()), tmp_path / "found.json")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    ladder, row = ["bf16", "int8", "int4"], {"seeds": {"0": {"rungs": [1, 2]}}}
    mixed = table_codec_control._settles_on(ladder, row)
    assert mixed == "int8 forward, int4 backward"


def test_runs_are_done_once_and_stages_apart(tmp_path):
    stub = Stub()
    with pytest.raises(errors.NebulaError, match="--stages=speed comes first"):
        run_all(tmp_path, stub, ["quality"])
    run_all(tmp_path, stub, ["speed"])
    assert stub.names[0] == "int4-60"
    assert len(stub.names) == len(set(stub.names)) == 9 + 8
    run_all(tmp_path, stub, ["quality"])
    # On the line of 1000 Mbit/s all are as fast.
    assert stub.names[17:] == [
        f"quality-{which}-seed{seed}"
        for seed in "01"
        for which in ("int4", "bf16", "int4-longer")
    ]
    run_all(tmp_path, stub)
    assert len(stub.names) == 23


def test_a_stage_that_there_is_not_is_an_error(tmp_path):
    from absl import flags

    flags.FLAGS["stages"].value = ["speeed"]
    try:
        with pytest.raises(
            errors.SettingsError, match="no speeed; there are speed, qu"
        ):
            config.chosen("stages", table_codec_control.STAGES)
    finally:
        flags.FLAGS["stages"].unparse()
    assert config.chosen("stages", ("a", "b")) == ("a", "b")
