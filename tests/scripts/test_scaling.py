import subprocess
import sys

import pytest

from scripts import scaling


@pytest.fixture(scope="module")
def result():
    m3 = [
        {
            "clusters": clusters,
            "rate": rate,
            "delay": delay,
            "efficiency": min(1.0, rate / (10 * clusters)),
        }
        for clusters in scaling.CLUSTERS
        for rate in scaling.RATES
        for delay in scaling.SHOWN_DELAYS
    ]
    abnet = [
        {"codecs": ", ".join(codecs), "rate": rate, "delay": delay, "efficiency": 0.5}
        for codecs in scaling.CODECS
        for rate in scaling.RATES
        for delay in scaling.DELAYS
    ]
    return {"m3": m3, "abnet": abnet}


def test_the_slowest_good_line_is_named(result):
    hardware = {"cpu": "a CPU", "cores": 2, "python": "3.11", "jax": "0.10"}
    about = {"command": "x", "commit": "a", "seconds": 1.0, "hardware": hardware}
    text = scaling.markdown(about | result)
    assert "| 2 | 20 Mbit/s | 20 Mbit/s | 20 Mbit/s |" in text
    assert "| 64 | 1,000 Mbit/s |" in text


def test_the_picture_is_drawn(result, tmp_path):
    scaling.draw(result, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_is_shared_by_its_connections():
    shared = scaling.line(80, 30, 4)
    assert shared.up.bytes_per_second == 2.5e6
    assert shared.down.delay_seconds == 0.03


@pytest.mark.parametrize("script", ["scaling", "bench_planner"])
def test_a_flag_that_would_change_nothing_is_refused(script):
    """The plans' flags are set by the script, and would stand in its record."""
    command = [sys.executable, "-m", f"scripts.{script}", "--out=x", "--window=3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Unknown command line flag 'window'" in done.stderr
