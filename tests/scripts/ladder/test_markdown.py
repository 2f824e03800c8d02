import copy

import pytest

from nebula_jax.runtime.records import report
from scripts import make_tables
from scripts.ladder import markdown
from scripts.plans import bert as plan


def rung(name, **changes):
    return {
        "name": name,
        "ms": 1234.5,
        "tokens_per_second": 4321.0,
        "least": 4000.0,
        "most": 5000.0,
        "over_first": 2.5,
        "over_pytorch": None,
        "devices": 1,
        "padding": 0.5,
        "losses": [9.0, 8.75, 8.5],
        "all_reduce_times": 0,
        "all_reduce_scalars": 0,
        "all_reduce_bytes": 0,
        "flags": {},
        "over_below": None,
        "difference": None,
    } | changes


LADDER = {
    "model": {
        "size": "mini", "layers": 4, "width": 256, "vocab_size": 8000,
        "parameters": 5_314_000,
    },
    "text": "package:django",
    "batch": [32, 128],
    "platform": "cpu",
    "rounds": 5,
    "start": {"dtype": "float32", "logits": "all"},
    "attention": "einsum",
    "packed_padding": 0.097,
    "rungs": [
        rung("float32"),
        rung(
            "one all-reduce", flags={"all_reduce": "once"}, over_below=1.25,
            over_pytorch=3.0, difference=1.5e-6, devices=2, all_reduce_times=1,
            all_reduce_scalars=2, all_reduce_bytes=21_258_512,
        ),
    ],
    "beside": [
        {"name": "PyTorch", "ms": 10.0, "tokens_per_second": 100.0, "least": 90.0,
         "most": 110.0, "over_first": 0.5, "over_pytorch": 1.0},
    ],
}  # fmt: skip
ROW = {
    "processes": 4,
    "step_seconds": 0.569,
    "not_slept": 0.069,
    "efficiency": 0.9357,
    "exposed": 0.0643,
    "all_reduces": 1,
    "bytes_formula": 8_697_984.0,
    "bytes_program": 8_698_008.0,
    "bytes_loopback": None,
    "loss_difference": 2e-6,
    "difference": 3.4e-7,
    "equal": 0.653,
}
RECORD = {
    "command": "python -m scripts.bert_ladder",
    "commit": "abc123",
    "hardware": {
        "cpu": "a CPU", "cores": 2, "devices": "NVIDIA H200", "python": "3", "jax": "0",
    },
    "seconds": 270.0,
    "seed": 3,
    "ladder": LADDER,
    "scaling": {
        "model": {"size": "tiny", "parameters": 1_449_664},
        "batch": [16, 32],
        "micro_batches": 2,
        "steps": 20,
        "emulated_seconds": 0.5,
        "rows": [ROW],
    },
}  # fmt: skip


def test_the_ladder_has_rates_and_parity():
    text = markdown.markdown(RECORD)
    for part in (
        "Commit abc123, seed 3, 2 cores of a CPU",
        "mini, 4 layers of width 256, 8,000 pieces, 5.31 M parameters; 32 x 128 tokens",
        "5 rounds, on 2 cores. The first rung has `--dtype=float32 --logits=all`",
        "| float32 | | 1234 | 4,321 | 4,000-5,000 | – | 2.50 | – |",
        "| one all-reduce | `--all_reduce=once` | 1234 | 4,321 | 4,000-5,000 | 1.25 |"
        " 2.50 | 3.00 |",
        "| PyTorch | | 10 | 100 | 90-110 | – | 0.50 | 1.00 |",
        "| one all-reduce | 2 | 50% | 9.0000 → 8.5000 | 1.5e-06 | 1 | 21.3 MB |",
        "the first 3 steps",
        "10% of it is padding",
        "go on without it",
        "simulated",
    ):
        assert part in text
    assert "There is one device" not in text


def test_on_one_gpu_two_rungs_are_missing():
    record = copy.deepcopy(RECORD)
    record["ladder"] |= {"platform": "gpu", "attention": "fused"}
    record["ladder"]["rungs"] = [rung("float32"), rung("accumulation")]
    text = markdown.markdown(record)
    assert "5 rounds, on NVIDIA H200" in text
    assert "so it goes on." in text
    assert "There is one device" in text
    assert "simulated" not in text


def test_scaling_is_marked_as_slept():
    text = markdown.markdown(RECORD)
    for part in (
        "a cluster of 4 processes",
        "| 4 | 3.4e-07 | 65.3% | 2.0e-06 | 8.7 MB | 8.7 MB | – |",
        "| 4 | 569 | 69 | 0.936 | 6.4% |",
        "**A sleep stands in for compute** (--emulate_compute): 500 ms",
    ):
        assert part in text


@pytest.mark.parametrize("table", ["ladder", "scaling"])
def test_a_record_may_lack_a_table(table):
    text = markdown.markdown({k: v for k, v in RECORD.items() if k != table})
    assert ("**The ladder**" in text) == (table != "ladder")
    assert ("**Scaling**" in text) == (table != "scaling")


def test_the_cost_is_the_plans(tmp_path):
    cost = plan.record()
    record = RECORD | {"cost": cost}
    assert markdown.markdown(record).endswith("\n\n" + plan.markdown(cost))
    report.write(tmp_path / "bert_ladder.json", record)
    assert make_tables.block("bert_ladder", tmp_path) == markdown.markdown(record)
