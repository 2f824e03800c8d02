import itertools

import pytest

from nebula_jax import errors
from nebula_jax.communication import wan

SLOW = wan.Line(60e6, 0.015)


def test_flags_are_read():
    assert wan.from_string("60mbit,15ms") == wan.Lines(SLOW, SLOW)
    assert wan.from_string("1.5gbit").up == wan.Line(1.5e9, 0.0)
    assert wan.from_string("0.1s").down == wan.Line(0.0, 0.1)
    assert wan.from_string("") == wan.Lines(wan.UNSHAPED, wan.UNSHAPED)
    cuts = wan.from_string("cut=2s@10s,cut=500ms@20s").up.cuts
    assert cuts == ((10.0, 2.0), (20.0, 0.5))
    changing = wan.from_string("60mbit,15ms,10mbit@1s,1gbit@500ms").up
    assert changing == wan.Line(60e6, 0.015, changes=((1.0, 10e6), (0.5, 1e9)))


def test_each_direction_may_have_its_own_line():
    lines = wan.from_string("up:60mbit,15ms; down:15ms")
    assert lines == wan.Lines(up=SLOW, down=wan.Line(0.0, 0.015))
    assert wan.from_string("down:60mbit,15ms") == wan.Lines(down=SLOW)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("15ms,60mb", "cannot read '60mb'"),
        ("15ms,20ms", "gives the delay twice"),
        ("up:15ms;up:20ms", "names up twice"),
        ("15ms;up:20ms", "names up twice"),
        ("sideways:15ms", "cannot read 'sideways'"),
        ("cut=2s", "cannot read 'cut=2s'"),
        ("15ms,10mbit@60s", "a rate that changes needs one that it begins with"),
        ("60mbit,0mbit@60s", "none of them can be 0"),
        ("60mbit,10mbit@", "cannot read '10mbit@'"),
        ("60mbit,10mbit@60s,20mbit@60s", "two rates begin at the same time"),
    ],
)
def test_a_bad_flag_names_its_bad_part(flag, words):
    with pytest.raises(errors.NebulaError, match=f"wan={flag}: .*{words}"):
        wan.from_string(flag)


def pieces(line, buffers, gap=0.0):
    """Arrival and bytes of each piece; buffers are put `gap` seconds apart."""
    shaper, found, now, put = wan.Shaper(line), [], 0.0, 0
    while True:
        while put < len(buffers) and now >= put * gap:
            shaper.put(buffers[put], now)
            put += 1
        while (view := shaper.due(now)) is not None:
            found.append((now, bytes(view)))
            shaper.wrote(len(view))
        waits = [] if (wait := shaper.wait(now)) is None else [now + wait]
        waits += [put * gap] if put < len(buffers) else []
        if not waits:
            return found
        now = max(min(waits), now + 1e-9)


@pytest.mark.parametrize(("rate", "delay"), [(60e6, 0.015), (170e6, 0.0), (1e6, 0.5)])
def test_bytes_arrive_at_the_rate_after_the_delay_and_in_order(rate, delay):
    buffers = [bytes([n]) * (100_000 + n) for n in range(5)]
    size = sum(map(len, buffers))
    found = pieces(wan.Line(rate, delay), buffers)
    assert b"".join(data for _, data in found) == b"".join(buffers)
    assert found[-1][0] == pytest.approx(8 * size / rate + delay, rel=1e-9)


def test_a_line_that_is_fed_when_it_is_ready_keeps_its_rate():
    """The thread wakes 2 ms late every time; small tensors still go out at the rate."""
    shaper = wan.Shaper(wan.Line(60e6))
    now, put = 0.0, 0
    while put < 200:
        while put < 200 and shaper.ready(now):
            shaper.put(bytes(6000), now)
            put += 1
        now += (shaper.wait(now) or 0.0) + 0.002
        while (view := shaper.due(now)) is not None:
            shaper.wrote(len(view))
    while (wait := shaper.wait(now)) is not None:
        now += wait
        while (view := shaper.due(now)) is not None:
            shaper.wrote(len(view))
    assert now == pytest.approx(8 * 6000 * 200 / 60e6, rel=0.03)


def test_a_rate_changes_at_its_time_also_in_the_middle_of_a_slice():
    """1 MiB at 100 kbit/s for a second, then at 10 Mbit/s."""
    line = wan.from_string("100kbit,10mbit@1s").up
    when, _ = pieces(line, [bytes(1 << 20)])[-1]
    assert when == pytest.approx(1.0 + (8.0 * (1 << 20) - 100e3) / 10e6, rel=1e-9)


@pytest.mark.parametrize(
    "flag", ["40kbit", "40kbit,15ms,1mbit@1s,10kbit@2s", "10mbit,40kbit@10ms", "10kbit"]
)
def test_a_slow_line_delivers_little_by_little(flag):
    """As a real one does: whoever waits for the whole sees it come."""
    line = wan.from_string(flag).up
    times = [0.0, *(when for when, _ in pieces(line, [bytes(27_000)]))]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) <= line.delay + 0.11


def test_a_fast_line_delivers_by_the_slice():
    """Waking for less would take from computing."""
    found = pieces(wan.Line(60e6), [bytes(1_000_000)])
    sizes = [len(data) for _, data in found]
    assert sizes == [wan.SLICE_BYTES] * 15 + [1_000_000 - 15 * wan.SLICE_BYTES]


def test_nothing_passes_during_a_cut_and_all_of_it_after():
    line = wan.Line(delay=0.01, cuts=((1.0, 2.0),))
    times = [when for when, _ in pieces(line, [bytes(100)] * 50, gap=0.1)]
    assert not [when for when in times if 1.0 <= when < 3.0]
    before = [when for when in times if when < 1.0]
    assert len(before) == 10
    assert times[10] == pytest.approx(3.0 + 0.01, abs=1e-3)
    assert times[-1] == pytest.approx(4.9 + 0.01, abs=1e-3)


def test_a_broken_connection_loses_what_was_on_its_way():
    shaper = wan.Shaper(wan.Line(1e6, 0.1))
    shaper.put(bytes(100_000), 0.0)
    shaper.clear()
    assert shaper.empty
    assert shaper.ready(0.0)
    shaper.put(b"next", 1.0)
    assert shaper.wait(1.0) == pytest.approx(0.1, abs=0.001)
