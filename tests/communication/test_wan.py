import pytest

from nebula_jax import errors
from nebula_jax.communication import wan


def test_flags_are_read():
    assert wan.from_string("60mbit,15ms") == wan.Line(60e6, 0.015)
    assert wan.from_string("1.5gbit") == wan.Line(1.5e9, 0.0)
    assert wan.from_string("0.1s") == wan.Line(0.0, 0.1)
    assert wan.from_string("") == wan.Line()


def test_a_bad_flag_names_its_bad_part():
    with pytest.raises(errors.NebulaError, match="cannot read '60mb'"):
        wan.from_string("15ms,60mb")


def deliver(shaper, buffers):
    """When the last byte arrives, on a clock that jumps from event to event."""
    now = 0.0
    data = b""
    for buffer in buffers:
        shaper.put(buffer, now)
    while (wait := shaper.wait(now)) is not None:
        now += wait
        while (view := shaper.due(now)) is not None:
            data += view[:1000]
            shaper.wrote(min(1000, len(view)))
    return now, data


@pytest.mark.parametrize(("rate", "delay"), [(60e6, 0.015), (170e6, 0.0), (1e6, 0.5)])
def test_bytes_arrive_at_the_rate_after_the_delay_and_in_order(rate, delay):
    buffers = [bytes([n]) * (100_000 + n) for n in range(5)]
    size = sum(map(len, buffers))
    when, data = deliver(wan.Shaper(wan.Line(rate, delay)), buffers)
    assert data == b"".join(buffers)
    assert when == pytest.approx(8 * size / rate + delay, rel=1e-9)


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


def test_an_unlimited_line_only_delays():
    shaper = wan.Shaper(wan.Line())
    shaper.put(b"now", 1.0)
    assert bytes(shaper.due(1.0)) == b"now"
    shaper = wan.Shaper(wan.Line(delay=0.2))
    shaper.put(b"later", 1.0)
    assert shaper.due(1.1) is None
    assert shaper.wait(1.1) == pytest.approx(0.1)
    assert bytes(shaper.due(1.2)) == b"later"
