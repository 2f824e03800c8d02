"""A traced run: where its time went, what was on its lines."""

import collections
import json

import pytest

LOOPS = {"compute", "wait", "next batch", "encode", "send", "saving", "evaluating"}


@pytest.fixture(scope="module")
def run(runs):
    """A traced run over an emulated line, with TLS."""
    status, output = runs.run(
        *["--trace"],
        steps=60,
        checkpoint_every=20,
        eval_every=30,
        wan="60mbit,2ms",
        workdir="traced",
    )
    assert status == 0, output
    return runs.folder / "traced", output


def spans(folder):
    """Process and lane -> spans."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {
        (each["pid"], each["tid"], each["name"]): each["args"]["name"]
        for each in events
        if each["ph"] == "M"
    }
    found = collections.defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            process = names[each["pid"], 0, "process_name"]
            lane = names[each["pid"], each["tid"], "thread_name"]
            found[process, lane].append(each)
    return found


def test_every_process_and_direction_of_the_line_has_a_lane(run):
    found = spans(run[0])
    assert set(found) == {
        ("discriminator", "loop"),
        ("generator:0", "loop"),
        ("generator:1", "loop"),
        ("discriminator", "line from generator:0"),
        ("discriminator", "line from generator:1"),
    }
    assert {each["name"] for each in found["generator:0", "loop"]} >= LOOPS
    of_discriminator = {each["name"] for each in found["discriminator", "loop"]}
    assert of_discriminator >= {"compute", "wait", "receive", "decode", "saving"}
    steps = [
        each["args"]["step"]
        for each in found["discriminator", "line from generator:1"]
        if each["name"] == "wire tokens"
    ]
    assert steps == list(range(1, 61))


def test_spans_of_a_lane_lie_within_each_other_or_apart(run):
    for lane in spans(run[0]).values():
        open_until = []
        for each in sorted(lane, key=lambda each: (each["ts"], -each["dur"])):
            begin, end = each["ts"], each["ts"] + each["dur"]
            while open_until and open_until[-1] <= begin + 1:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1  # microseconds
            open_until.append(end)


def test_the_parts_of_the_time_add_up_to_it(run):
    summary = json.loads((run[0] / "summary.json").read_text())
    for cluster in summary["clusters"]:
        time = cluster["time"]
        named = sum(time["parts"].values()) - time["parts"]["other"]
        assert 0.97 * time["seconds"] <= named <= 1.001 * time["seconds"]
        assert time["seconds"] == pytest.approx(cluster["seconds"], rel=0.03)
    assert "Where the time went:" in run[1]


def test_the_bytes_are_those_that_the_kernel_counts(run):
    summary = json.loads((run[0] / "summary.json").read_text())
    for cluster in summary["clusters"]:
        for line in cluster["time"]["lines"].values():
            counted = line["frames"] + line["tls"]
            assert line["kernel_sent"] > 0
            assert counted == pytest.approx(line["kernel_sent"], rel=0.01)
