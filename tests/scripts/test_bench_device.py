import dataclasses
import json
import subprocess
import sys
from unittest import mock

import jax
import pytest

from nebula_jax import installed
from scripts import bench_device
from scripts.bench import device_step


def test_the_operations_of_a_step_are_those_of_its_products():
    smaller = {"layers": 1, "max_length": 64, "vocab_size": 2_000}
    model = dataclasses.replace(device_step.BASE, **smaller)
    dense = 6 * (4 * 768**2 + 2 * 768 * 3072 + 2 * 64 * 768)
    head = 6 * (768**2 + 768 * 2_000) * 9 / 64  # 9 of 64 have logits
    assert device_step.flops_per_token(model) == pytest.approx(dense + head)


def test_a_rung_trains_and_tells_its_figures():
    library = jax.nn.dot_product_attention
    with mock.patch.object(jax.nn, "dot_product_attention", wraps=library) as asked:
        found = device_step.measure("fused", True, 2)
    assert asked.called
    assert len(found["losses"]) == device_step.WARM + 2
    assert all(4 < loss < 7 for loss in found["losses"])  # log(200) is 5.3
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["ms"] * 1e3)


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("print('compiling', '{\"ms\": 2}', sep=chr(10))", None),
        ("import time; time.sleep(60)", "not measured in 1 s"),
        ("raise SystemExit(3)", "ended with 3"),
    ],
)
def test_a_rung_that_ends_early_says_why(tmp_path, monkeypatch, code, failed):
    (tmp_path / "rung.py").write_text(code)
    monkeypatch.setattr(bench_device, "STEP", "rung")
    monkeypatch.setattr(installed, "FOLDER", tmp_path)
    seconds = 1.0 if "sleep" in code else 60.0
    found = bench_device.steps({"it": "x"}, [], False, seconds)["it"]
    assert found.get("failed") == failed
    assert failed or found["ms"] == 2


@pytest.mark.slow
def test_all_parts_run_on_cores(tmp_path):
    out = tmp_path / "device.json"
    command = [sys.executable, "-m", "scripts.bench_device", "--tiny", "--rounds=1"]
    done = subprocess.run(
        [*command, f"--out={out}"], cwd=installed.FOLDER, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert "ms" in found["steps"]["fused"]
    first, second = found["steps"]["first"], found["steps"]["second"]
    assert first["digest"] == second["digest"]
    assert jax.default_backend() == "cpu"
