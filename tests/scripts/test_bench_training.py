import json
from unittest import mock

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from scripts import bench_training
from scripts.bench import bert_levels, interleave, pytorch, report

SMALL = bench_training.FINE_TUNING._replace(**bench_training.SMALL)


def time_runs(runs, rounds, warm=0):
    """Nothing runs: compiling all of it takes a minute."""
    return {name: [0.5 * number] * rounds for number, name in enumerate(runs, 1)}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of tiny shapes, PyTorch or not."""
    out = tmp_path_factory.mktemp("bench") / "training.json"
    flags.FLAGS(["test"])
    with (
        flagsaver.flagsaver(out=str(out), rounds=1, small_shapes=True),
        mock.patch.object(interleave, "time_runs", time_runs),
    ):
        assert bench_training.main() == 0
    return json.loads(out.read_text())


def test_the_steps_without_a_measure_compute_the_same():
    _, metrics = bench_training.fine_tuning(SMALL, "float32")()
    _, plain = bench_training.fine_tuning(SMALL, "float32", donates=False)()
    by_library = bench_training.by_the_library(
        bench_training.fine_tuning(SMALL, "float32")
    )
    library = jax.nn.dot_product_attention
    with mock.patch.object(jax.nn, "dot_product_attention", wraps=library) as asked:
        _, theirs = by_library()
    assert asked.called
    for name in ("loss", "tokens"):
        assert float(plain[name]) == pytest.approx(float(metrics[name]), rel=1e-6)
        assert float(theirs[name]) == pytest.approx(float(metrics[name]), rel=1e-5)


def test_parts_and_a_masked_lm_without_its_measure_run():
    shape = bench_training.MLM._replace(**bench_training.SMALL)
    everywhere = bench_training.without(shape)["logits where masked, not everywhere"]
    _, metrics = everywhere()
    assert metrics["loss"] > 0
    for part in bench_training.parts(shape, "bfloat16").values():
        jax.block_until_ready(part())


def test_every_step_is_measured_in_both_precisions(result):
    assert [each["what"] for each in result["measured"]] == [
        bench_training.FINE_TUNING.what,
        bench_training.MLM.what,
    ]
    for each in result["measured"]:
        steps = {step["name"]: step for step in each["steps"]}
        assert {"here, float32", "here, bfloat16"} <= steps.keys()
        assert all(step["tokens_per_second"] > 0 for step in steps.values())
        assert ("PyTorch, float32" in steps) == pytorch.is_installed()


def test_what_each_measure_gained_is_seen_without_it(result):
    for each, optimization in zip(
        result["measured"], ("rows as long as", "logits where masked"), strict=True
    ):
        names = [gain["measure"] for gain in each["gains"]]
        assert len(names) == 3
        assert names[-1].startswith(optimization)
        # As `time_runs` above times them: the fourth and later, beside our second.
        ours = [step["name"] for step in each["steps"]].index("here, bfloat16") + 1
        for number, gain in enumerate(each["gains"], len(each["steps"]) + 1):
            assert gain["times"] == number / ours


def test_a_profile_has_every_part_of_its_step(result):
    both = {"attention", "feed-forward, layer norms", "optimizer, and what is left"}
    for each, more in zip(
        result["measured"],
        ({"embeddings"}, {"embeddings and head", "sampling"}),
        strict=True,
    ):
        rows = {row["part"]: row["ms"] for row in each["profile"]}
        assert rows.keys() == both | more
        assert all(rows[name] > 0 for name in {"attention", *more})


def test_every_level_of_berts_step_has_the_same_loss(result):
    """Joined rows leave nothing out of so small a batch; accumulation adds up alike."""
    shape = bert_levels.SHAPE._replace(**bench_training.SMALL, batch=16, length=64)
    losses = {
        name: float(run()["loss"]) for name, run in bert_levels.steps(shape).items()
    }
    first = losses["float32, logits everywhere, padded rows"]
    assert all(loss == pytest.approx(first, rel=2e-3) for loss in losses.values())
    levels = result["bert"]["levels"]
    assert [each["name"] for each in levels] == list(bert_levels.LEVELS)
    assert levels[0]["over_below"] is None
    assert levels[-1]["over_first"] == 1 / 6  # as `time_runs` above times them


def test_the_target_is_pytorchs_rate():
    def step(name, over):
        return {
            "name": name,
            "ms": 10.0,
            "tokens_per_second": 100.0,
            "over_pytorch": over,
            "over_same": over and over / 2,
        }

    measured = [
        {
            "what": "x",
            "shape": bench_training.MLM._asdict(),
            "steps": [step("here, bfloat16", over), step("PyTorch, float32", 1.0)],
            "gains": [{"measure": "buckets", "ms": 25.0, "times": 2.5}],
            "profile": [{"part": "attention", "ms": 4.0, "share": 0.4}],
        }
        for over in (1.5, 0.5)
    ]
    found = bench_training.targets(measured)
    assert [each["met"] for each in found] == [True, False]
    hardware = {"cores": 2, "cpu": "c", "python": "3", "jax": "0"}
    about = {"command": "c", "commit": "abc", "seconds": 60.0, "rounds": 3}
    block = report.training(
        about | {"hardware": hardware, "measured": measured, "targets": found}
    )
    assert "| here, bfloat16 | 10 ms | 100 | 1.50 | 0.75 |" in block
    assert "| attention | 4 ms | 40% |" in block
    assert "| buckets | 25 ms | 2.50 |" in block
    assert "**not met**" in block
