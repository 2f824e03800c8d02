import json

import numpy as np
import pytest
from absl.testing import flagsaver

from scripts import bench_codecs

SHAPE = (8, 16, 64)


def test_the_decaying_matrix_has_its_spectrum():
    matrix = np.asarray(bench_codecs.decaying(SHAPE, seed=0)).reshape(128, 64)
    singular = np.linalg.svd(matrix, compute_uv=False)
    want = np.arange(1, 65) ** -0.6
    np.testing.assert_allclose(singular / singular[0], want, rtol=1e-4)
    assert matrix.std() == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_a_tiny_run_prints_a_table_and_writes_json(monkeypatch, tmp_path, capsys):
    out = tmp_path / "codecs.json"
    tried = ("fp16", "int4(row)", "pack_tokens", "error_feedback(fp16)")
    monkeypatch.setattr(bench_codecs, "CODECS", tried)
    monkeypatch.setattr(bench_codecs, "SHAPE", (4, 8, 32))
    with flagsaver.flagsaver(rounds=1, out=str(out)):
        assert bench_codecs.main() == 0
    result = json.loads(out.read_text())
    assert {"command", "commit", "hardware", "seed", "seconds"} <= set(result)
    rows = {row["codec"]: row for row in result["codecs"]}
    assert list(rows) == list(tried)
    assert rows["fp16"]["ratio"] == 0.5
    assert 0 < rows["fp16"]["error_gaussian"] < 0.0005
    assert rows["pack_tokens"]["error_decaying"] == 0
    assert all(row["encode_ms"] > 0 and row["decode_ms"] > 0 for row in rows.values())
    lines = capsys.readouterr().out.splitlines()
    for name in rows:
        assert any(line.startswith(f"| `{name}` |") for line in lines)
