import socket
import time

import pytest

from scripts.bench import harness


def test_a_ratio_compares_within_rounds_and_runs_take_turns():
    assert harness.ratio([2.0, 4.0, 30.0], [1.0, 2.0, 3.0]) == 2.0
    order = []

    def runner(name, seconds):
        def run():
            order.append(name)
            time.sleep(seconds)

        return run

    seconds = harness.time_runs({"a": runner("a", 0.0), "b": runner("b", 0.01)}, 2)
    assert order == ["a", "b"] * 3  # the first round does not count
    assert len(seconds["a"]) == len(seconds["b"]) == 2
    assert min(seconds["b"]) >= 0.01
    order.clear()
    seconds = harness.time_runs(
        {"a": runner("a", 0.0), "b": runner("b", 0.01)}, 1, warm=1
    )
    assert order == ["a", "a", "b", "b"] * 2
    assert len(seconds["a"]) == 1


def test_a_port_is_kept_for_the_process_that_is_to_listen_there():
    where = "127.0.0.1", harness.free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(where)
    with socket.create_server(where) as ours, socket.create_connection(where):
        ours.accept()[0].close()
