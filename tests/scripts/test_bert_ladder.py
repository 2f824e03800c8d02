"""The ladder from end to end, tiny: every rung trains alike, and is measured."""

import json
from unittest import mock

import jax
import pytest
import tiny_runs
from absl import flags
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.runtime.ranks import devices
from scripts import bert_ladder
from scripts.bench import pytorch
from scripts.ladder import scaling, settings, timings

STEPS = 3
TINY = {
    **{"languages": "en", "vocab_size": 120, "model_size": "nano", "layers": 1},
    **{"max_length": 16, "batch_size": 16, "micro_batches": 2},
    **{"rounds": 1, "curve_steps": STEPS, "emulate_compute": 1},
}


def parsed(**values):
    for name, value in settings.DEFAULTS.items():
        flags.FLAGS.set_default(name, value)
    flags.FLAGS(["test", *(f"--{name}={value}" for name, value in values.items())])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    text = tiny_runs.write_text(folder / "text", ("en",))
    out = folder / "ladder.json"
    with (
        flagsaver.flagsaver(),
        mock.patch.object(devices, "simulate") as simulate,  # tests have eight
        mock.patch.object(scaling, "measure", return_value={"rows": []}) as runs,
        mock.patch.object(timings, "TRIED", 1),
    ):
        prepared = folder / "prepared"
        given = {"data_dir": text, "prepared_dir": prepared, "out": out}
        parsed(tables="ladder", **TINY, **given)
        assert bert_ladder.main() == 0
    assert simulate.call_args.args[0].devices_per_cluster == 2
    assert not runs.called
    return json.loads(out.read_text())


@pytest.mark.slow  # the rungs' parity: tests/training/test_bert.py
def test_a_rung_has_the_losses_of_the_one_below(record):
    rungs = record["ladder"]["rungs"]
    first = rungs[0]["losses"]
    assert len(first) == STEPS
    assert first[-1] < first[0] - 0.05  # there is a curve
    assert rungs[0]["difference"] is None
    for each in rungs[1:]:
        # Of bfloat16 operands; and of fused attention, which rounds its result to them.
        rounds = {"dtype", "attention"} & each["flags"].keys()
        assert each["difference"] < (0.02 if rounds else 1e-3), each["name"]
    assert rungs[1]["difference"] > 0


@pytest.mark.slow  # the rungs' parity: tests/training/test_bert.py
def test_joined_rows_have_less_padding_and_lose_no_text(record):
    padding = {each["name"]: each["padding"] for each in record["ladder"]["rungs"]}
    first, *_, last = padding.values()
    assert 0 < padding["joined rows"] <= last < first
    assert record["ladder"]["packed_padding"] < first


@pytest.mark.slow  # the rungs' parity: tests/training/test_bert.py
def test_all_reduces_are_those_of_the_compiled_steps(record):
    """In each micro-batch; once; once for head, layer and embeddings."""
    rungs = record["ladder"]["rungs"]
    assert [each["all_reduce_times"] for each in rungs] == [0, 0, 0, 0, 0, 2, 1, 3]
    assert [each["devices"] for each in rungs] == [1, 1, 1, 1, 1, 2, 2, 2]
    each, once, overlapped = (row["all_reduce_bytes"] for row in rungs[-3:])
    gradients = 4 * record["ladder"]["model"]["parameters"]
    assert once == overlapped
    assert gradients < once < gradients + 100  # and the metrics
    assert each > 2 * gradients


@pytest.mark.slow  # the rungs' parity: tests/training/test_bert.py
def test_every_step_is_timed(record):
    ladder = record["ladder"]
    rows = [*ladder["rungs"], *ladder["beside"]]
    assert all(each["least"] <= each["tokens_per_second"] for each in rows)
    names = [each["name"] for each in ladder["beside"]]
    assert timings.PACKED in names
    assert (timings.PYTORCH in names) == pytorch.is_installed()
    assert ladder["platform"] == jax.default_backend()


def test_what_cannot_work_is_refused_before_anything_is_compiled():
    for values, named in (
        ({"tables": "ladder,prices"}, "--tables=ladder,prices"),
        ({"batch_size": 9}, "--micro_batches=2 does not divide --batch_size=9"),
        ({"batch_size": 6}, "does not divide over 2 devices"),
    ):
        with flagsaver.flagsaver():
            parsed(**{**TINY, **values})
            with pytest.raises(errors.SettingsError, match=named):
                settings.from_flags()


def test_a_trial_is_small():
    with flagsaver.flagsaver():
        parsed(trial=True)
        tried = settings.from_flags()
        parsed(trial=False)
        whole = settings.from_flags()
    assert tried.run.agreed.model_size == "nano"
    assert tried.scaling_steps < whole.scaling_steps
    assert whole.run.agreed.model_size == "mini"
    assert (whole.processes, tried.processes) == ((1, 2, 4), (1, 2))
