import json
from unittest import mock

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from scripts import bench_training
from scripts.bench import harness, pytorch, report

TINY = {"layers": 1, "width": 32, "heads": 2, "feed_forward": 64, "vocab_size": 100}
SMALL = bench_training.FINE_TUNING._replace(**TINY)
MLM = bench_training.MLM._replace(**TINY)


def time_runs(runs, rounds, warm=0):
    """Nothing runs: compiling all of it takes a minute."""
    return {name: [0.5 * number] * rounds for number, name in enumerate(runs, 1)}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of tiny shapes, PyTorch or not."""
    out = tmp_path_factory.mktemp("bench") / "training.json"
    flags.FLAGS(["test"])
    with (
        flagsaver.flagsaver(out=str(out), rounds=1),
        mock.patch.object(harness, "time_runs", time_runs),
        mock.patch.object(bench_training, "FINE_TUNING", SMALL),
        mock.patch.object(bench_training, "MLM", MLM),
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


def test_a_masked_lm_with_logits_everywhere_runs():
    everywhere = bench_training.without(MLM)["logits where masked, not everywhere"]
    _, metrics = everywhere()
    assert metrics["loss"] > 0


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
    assert "| buckets | 25 ms | 2.50 |" in block
    assert "**not met**" in block
