import json
import threading

import pytest

from nebula_jax import trace as trace_lib


@pytest.fixture
def trace(clock):
    made = trace_lib.Trace(is_on=True, clock=clock)
    made.begin()
    return made


def test_each_second_counts_once_for_the_innermost_span(trace, clock):
    with trace.span("compute"):
        clock.now += 2
        with trace.span("send"):
            clock.now += 1
            with trace.span("wait"):
                clock.now += 4
        clock.now += 3
    clock.now += 5  # in no span
    with trace.span("compute"):
        clock.now += 1
    ledger = trace.ledger
    assert ledger.parts == {"compute": 6, "send": 1, "wait": 4}
    assert (ledger.seconds, ledger.other) == (16, 5)


def test_a_span_that_an_error_ends_counts_too(trace, clock):
    def fail():
        with trace.span("compute"):
            clock.now += 2
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert trace.ledger.parts == {"compute": 2}


def test_getting_each_item_is_a_span(trace, clock):
    def items():
        for number in range(3):
            clock.now += 1
            yield number

    for number in trace.each("wait", items()):
        clock.now += 10
        assert number in range(3)
    assert trace.ledger.parts == {"wait": 3}


def test_what_came_before_can_be_made_one_part(trace, clock):
    with trace.span("compute"):
        clock.now += 7
    clock.now += 1
    trace.lump("until step 1")
    with trace.span("compute"):
        clock.now += 2
    assert trace.ledger.parts == {"until step 1": 8, "compute": 2}
    assert trace.ledger.other == 0


def test_another_thread_has_a_lane_and_no_part(trace, clock):
    def work():
        with trace.span("wait"):
            clock.now += 1

    thread = threading.Thread(target=work, name="reader")
    thread.start()
    thread.join()
    assert not trace.ledger.parts
    assert trace.ledger.other == 1


def test_a_trace_that_is_off_records_nothing(tmp_path):
    off = trace_lib.Trace()
    off.begin()
    with off.span("compute"):
        pass
    off.add("line", "wire", 0, 1)
    assert off.ready(3) == 3
    assert not off.ledger.parts
    off.write(tmp_path / "t.json", "x")
    assert kinds(tmp_path / "t.json") == ["M", "M"]


def read(path):
    return json.loads(path.read_text())["traceEvents"]


def kinds(path):
    return [each["ph"] for each in read(path)]


def test_a_file_is_of_trace_events(trace, clock, tmp_path):
    with trace.span("compute", step=7):
        clock.now += 0.25
    trace.add("line from d", "wire tokens", clock.now, clock.now + 0.5, bytes=9)
    trace.write(tmp_path / "t.json", "generator:0")
    *named, compute, wire = read(tmp_path / "t.json")
    assert [(each["name"], each["tid"], each["args"]["name"]) for each in named] == [
        ("process_name", 0, "generator:0"),
        ("thread_name", 1, "loop"),
        ("thread_name", 2, "line from d"),
    ]
    of_compute = compute["name"], compute["tid"], compute["args"]
    assert of_compute == ("compute", 1, {"step": 7})
    of_wire = wire["dur"], wire["args"]
    assert (compute["dur"], *of_wire) == (250_000, 500_000, {"bytes": 9})
    assert wire["ts"] - compute["ts"] == pytest.approx(250_000, abs=0.5)


def test_the_first_spans_are_kept_and_the_others_counted(
    trace, clock, tmp_path, monkeypatch
):
    monkeypatch.setattr(trace_lib, "MOST_SPANS", 2)
    for _ in range(5):
        with trace.span("compute"):
            clock.now += 1
    trace.write(tmp_path / "t.json", "x")
    assert kinds(tmp_path / "t.json").count("X") == 2
    whole = json.loads((tmp_path / "t.json").read_text())
    assert whole["otherData"] == {"spans not kept": 3}
    assert trace.ledger.parts == {"compute": 5}
