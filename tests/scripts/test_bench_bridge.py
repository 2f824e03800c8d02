"""scripts/bench_bridge.py with little data: what it writes, and that it ends."""

import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from nebula_jax import errors
from scripts import bench_bridge
from scripts.bench import transports
from scripts.bench.transports import worker

ROOT = pathlib.Path(__file__).parents[2]
ENDS_SOON = 5.0  # seconds
LITTLE = ["--rounds=1", "--megabytes=1", "--nooverlap"]


def bench(*arguments):
    command = [sys.executable, "-m", "scripts.bench_bridge", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_it_writes_the_figures_of_every_transport_beside_their_targets(tmp_path):
    names = ["tls", "bridge_tls"]
    out = tmp_path / "bench.json"
    done = bench(f"--transports={','.join(names)}", f"--out={out}", *LITTLE)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["command"].startswith("python -m scripts.bench_bridge --transports=")
    assert {"commit", "seconds", "rounds", "load_before_and_after"} <= result.keys()
    assert {"cpu", "cores", "python", "jax"} <= result["hardware"].keys()
    assert result["message_bytes"]["25 MB"] == 64 * 128 * 768 * 4
    assert result["left_out"] == {}
    assert list(result["transports"]) == names
    for measures in result["transports"].values():
        trips = ["round trip", "round trip, one core"]
        assert list(measures) == ["25 MB", "3 MB", *trips]
        for figures in measures.values():
            for spread in figures.values():
                assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        assert measures["round trip"]["p50_microseconds"]["median"] < 1e5
    # Throughput and CPU at two sizes, and the round trip.
    assert len(result["targets"]) == 2 * 2 + 1
    for each in result["targets"]:
        assert each["what"].startswith("bridge")
        limit = each.get("at_least", each.get("at_most"))
        reached = each["value"] - limit if "at_least" in each else limit - each["value"]
        assert each["met"] == (reached >= 0)
    assert "bridge_tls: 3 MB, throughput / tls" in done.stdout


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--transports=tcp,pigeon", "--transports: no 'pigeon'; there are tcp, tls,"),
        ("--netns=60", "RATE is '60'"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(flag, words):
    done = bench(flag)
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_processes_end_when_the_benchmark_is_killed(tmp_path):
    out = tmp_path / "killed.json"  # its path tells our processes from others'
    benchmark = subprocess.Popen(
        [
            *[sys.executable, "-m", "scripts.bench_bridge", "--transports=tcp,bridge"],
            *["--rounds=1000", f"--out={out}"],
        ],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "round 1 of 1000" in benchmark.stderr.readline()
    assert len(workers(tmp_path)) == 4
    benchmark.kill()
    benchmark.wait()
    deadline = time.monotonic() + ENDS_SOON
    while left := workers(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def workers(folder):
    """Process ids of those whose control socket lies in `folder`."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text(errors="replace")
        except OSError:  # it has just ended
            continue
        if "scripts.bench.transports.worker" in command and str(folder) in command:
            found.append(process.name)
    return found


class Echo:
    """An end that receives what was sent on it, or something else."""

    def __init__(self, change=lambda message: message):
        self._change = change
        self._messages = [change(message) for message in self._expected()]

    def _expected(self):
        for number in range(3):
            yield np.random.default_rng([64, number]).integers(0, 256, 64, np.uint8)

    def send(self, buffer):
        del buffer

    def receive(self, size):
        del size
        return self._messages.pop(0)


def test_a_transport_that_delivers_something_else_is_found_out():
    worker.verify(Echo(), sends=False, size=64, count=3)
    with pytest.raises(ValueError, match="message 0 of 64 bytes came out different"):
        worker.verify(Echo(lambda message: message ^ 1), False, size=64, count=3)
    repeats = Echo()
    repeats.receive(64)
    with pytest.raises(ValueError, match="message 0"):
        worker.verify(repeats, sends=False, size=64, count=3)


class BrokenPair:
    name = "broken"
    closed = False

    def close(self, at_once):
        self.closed = at_once


def test_a_transport_that_fails_is_left_out_and_the_others_go_on():
    made = bench_bridge.Bench()
    good, broken = BrokenPair(), BrokenPair()
    good.name = "good"
    made.pairs = [broken, good]
    done = []

    def measure(pair):
        if pair is broken:
            raise errors.NebulaError("broken: no such thing")
        done.append(pair.name)

    made.each("measuring", measure)
    made.each("measuring", measure)
    assert done == ["good", "good"]
    assert made.left_out == {"broken": "broken: no such thing"}
    assert broken.closed


def test_a_ratio_compares_rounds_before_it_takes_the_median():
    speeds = {"ours": [1.0, 9.0, 2.0], "theirs": [2.0, 10.0, 2.0]}
    records = {
        name: {"25 MB": [{"gigabytes_per_second": value} for value in values]}
        for name, values in speeds.items()
    }
    found = bench_bridge.ratio(
        records, "ours", "theirs", "25 MB", "gigabytes_per_second"
    )
    assert found == pytest.approx(0.9)  # the ratio of medians would be 1


def test_every_transport_is_a_file_with_both_functions():
    folder = pathlib.Path(transports.__file__).parent
    for transport in transports.TRANSPORTS.values():
        text = (folder / f"{transport.file}.py").read_text()
        assert "\ndef listen(meeting" in text
        assert "\ndef connect(meeting" in text
        assert not transport.reference or transport.reference in transports.TRANSPORTS
