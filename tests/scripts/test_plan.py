"""The planner's command: its counts against XLA's, its bytes against the codecs'."""

import json
import pathlib
from unittest import mock

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.pretraining import hot_start
from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs
from nebula_jax.communication.wire import frames
from nebula_jax.training import m3
from scripts import plan
from scripts.plans import traced

FLAGS = pathlib.Path(__file__).parents[2] / "experiments" / "flags"
SMALL = (
    f"--flagfile={FLAGS / 'm3_quickstart.flags'}",
    *("--wan=60mbit,15ms", "--vocab_size=1000"),
    *("--generator_layers=1", "--discriminator_layers=1"),
)
SPEED = "--device_tflops=0.1,0.05"


def given(*arguments):
    """Settings as the command line makes them, without a command."""
    with flagsaver.flagsaver():
        flags.FLAGS(["test", *arguments])
        return plan.from_flags()


# What is counted.


@pytest.fixture(scope="module")
def run():
    return given(*SMALL, SPEED, "--dropout=0").run


@pytest.fixture(scope="module")
def parts(run):
    return traced.parts(run)


def test_flops_are_those_of_the_matrix_products_and_little_more(run, parts):
    """Two products forward for each weight and row, and twice as many backward."""
    for part in parts:
        encoder = traced.count(part.params["encoder"])
        # Without attention and heads.
        products = 6 * part.rows * run.agreed.max_length * encoder
        assert products < part.flops(part.rows) < 3 * products


def test_devices_share_what_the_rules_split(parts):
    for part in parts:
        whole = traced.bytes_on_device(part.kept, 1)
        assert traced.bytes_on_device(part.kept, 8) == whole
        assert traced.bytes_on_device(part.kept, 2, fsdp=2) < 0.6 * whole
        split = traced.bytes_on_device(part.kept, 4, fsdp=2, model_parallel=2)
        assert split < 0.4 * whole


def test_a_generator_holds_its_gradients_from_micro_batch_to_micro_batch(parts):
    """Those of --fan_out, beside what --micro_batches adds up."""

    def states_of(parts):
        """Of both sides, in units of the gradients."""
        return np.asarray(
            [
                traced.bytes_on_device(part.kept, 1) / codec_lib.nbytes(part.params)
                for part in parts
            ]
        )

    def more(fan_out, micro_batches):
        flagged = f"--fan_out={fan_out}", f"--micro_batches={micro_batches}"
        run = given(*SMALL, SPEED, *flagged).run
        return states_of(traced.parts(run)) - states_of(parts)

    assert more(2, 1) == pytest.approx([1, 0])
    assert more(2, 2) == pytest.approx([2, 1])


def test_the_bytes_are_those_of_a_frame(run):
    spec = m3.tokens_spec(traced.model(run), run.agreed.batch_size)
    tokens = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)
    payload, _ = codecs.pack_ids(run.local.vocab_size).encode(tokens, ())
    buffers = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(payload)]
    frame = frames.encode(frames.Tensor(0, 1, 0, buffers), 1, 0)
    assert traced.message_bytes(run) == len(b"".join(frame))


@pytest.mark.slow
def test_the_gradients_that_are_timed_run(monkeypatch, parts):
    monkeypatch.setattr(traced, "TIMED_STEPS", 1)
    monkeypatch.setattr(traced, "MOST_FLOP", 1e6)
    for part in parts:
        assert traced.measure(part) > 0


def test_a_pretrained_start_has_the_shape_of_its_config(tmp_path):
    about = {
        "model_type": "bert",
        "vocab_size": 30_522,
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    plan_of = given(*SMALL[:3], f"--hot_start={tmp_path}", "--dtype=bfloat16")
    with mock.patch.object(hot_start, "folder", return_value=tmp_path):
        found = traced.model(plan_of.run)
    assert (found.generator.layers, found.discriminator.layers) == (3, 12)
    assert found.discriminator.width == 384
    assert found.discriminator.vocab_size == 1000
    assert found.discriminator.dtype == "bfloat16"


# The command.


def test_the_command_prints_a_plan_and_writes_its_numbers(tmp_path, capsys):
    out = tmp_path / "plan.json"
    with flagsaver.flagsaver():
        flags.FLAGS(["test", *SMALL, SPEED, f"--out={out}"])
        assert plan.main() == 0
    text = capsys.readouterr().out
    assert "The bottleneck: " in text
    assert "t_d / t_g, section 3.3: --fan_out=1" in text
    found = json.loads(out.read_text())
    assert found["steps"] == 1200
    assert [each["name"] for each in found["parts"]] == ["generators", "discriminator"]
    for each in found["parts"]:
        alone = each["flop"] / (1e12 * each["tflops"])
        assert found["busy"][each["name"]] == pytest.approx(alone)
    assert found["seconds"] == pytest.approx(max(found["busy"].values()), rel=0.01)


@pytest.mark.parametrize(
    ("flagged", "message"),
    [
        (["--cluster_devices=0,1"], "--cluster_devices=0,1: expected two numbers"),
        (["--cluster_devices=1,2,3"], "--cluster_devices=1,2,3: expected two"),
        (["--device_tflops=fast"], "--device_tflops=fast: expected two numbers"),
        (["--wan=fast"], "wan=fast: cannot read 'fast'"),
        (["--cluster_devices=3,1"], "batch_size=16 does not divide over 3 devices; 18"),
        (["--cluster_devices=1,1", "--model_parallel=2"], "model_parallel=2 does not"),
        (["--generators=0"], "--generators=0: expected a number from 1"),
        (["--generators=-2"], "--generators=-2: expected a number from 1"),
        (["--micro_batches=3"], "does not divide batch_size=16"),
        (["--generator_start=e5-small"], "go together"),
        (["--pipeline=2", "--fsdp=2"], "--pipeline=2: a plan has no"),
        (["--emulate_compute=50,400"], "--emulate_compute=50,400: a plan is"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(flagged, message):
    with pytest.raises(errors.NebulaError, match=message):
        plan.plan(given(*SMALL, SPEED, "--cluster_devices=2,2", *flagged))
