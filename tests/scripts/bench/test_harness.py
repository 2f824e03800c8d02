import time

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
