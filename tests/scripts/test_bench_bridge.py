"""scripts/bench_bridge.py with little data, with TLS: what it writes."""

import json
import sys

from absl.testing import flagsaver

from scripts import bench_bridge
from scripts.bench import harness, worker

MEASURES = ["25 MB", "3 MB", "round trip", "round trip, one core"]
WORKER = [sys.executable, "-m", "scripts.bench.worker"]
TLS = {name: worker.TRANSPORTS[name] for name in ("tls", "bridge_tls")}


def test_it_writes_the_figures_of_the_transports_beside_their_targets(
    tmp_path, monkeypatch, capsys, pool
):
    def together(commands, seconds):
        """In threads, which need no imports, in place of processes."""
        requests = [json.loads(command[-1]) for command in commands]
        assert all(each[:-1] == WORKER for each in commands)
        return list(pool.map(worker.main, requests))

    monkeypatch.setattr(harness, "together", together)
    monkeypatch.setattr(bench_bridge, "SENT_BYTES", 1e6)
    monkeypatch.setattr(bench_bridge, "SIZES", {"25 MB": 25_000, "3 MB": 3_000})
    monkeypatch.setattr(bench_bridge, "ROUND_TRIPS", 20)
    monkeypatch.setattr(bench_bridge, "TRANSPORTS", TLS)
    out = tmp_path / "bench.json"
    with flagsaver.flagsaver(rounds=1, out=str(out)):
        assert bench_bridge.main() == 0
    result = json.loads(out.read_text())
    assert {"command", "commit", "seconds", "load_before_and_after"} <= result.keys()
    assert {"cpu", "cores", "python", "jax"} <= result["hardware"].keys()
    assert list(result["transports"]) == list(TLS)
    for measures in result["transports"].values():
        assert list(measures) == MEASURES
        for figures in measures.values():
            for spread in figures.values():
                assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        assert measures["round trip"]["p50_microseconds"]["median"] < 1e5
    # Of the bridge: throughput and CPU at two sizes, round trip.
    assert len(result["targets"]) == 2 * 2 + 1
    for each in result["targets"]:
        assert each["what"].startswith("bridge_tls")
        limit = each.get("at_least", each.get("at_most"))
        reached = each["value"] - limit if "at_least" in each else limit - each["value"]
        assert each["met"] == (reached >= 0)
    assert "bridge_tls: 3 MB, throughput / tls" in capsys.readouterr().out
