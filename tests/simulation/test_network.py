"""The simulated line, held against arithmetic."""

import types

import pytest

from tests.simulation import network, world

LATENCY, RATE = 0.5, 1000.0


@pytest.mark.parametrize("connections", [1, 2])
def test_a_lines_rate_bounds_what_all_messages_take(connections):
    """20 x 1,000 bytes, on one connection or on two of the same line."""
    here = world.World(0)
    net = network.Network(here, lambda: network.Line(LATENCY, RATE))
    a, b = (
        world.Process(here, types.SimpleNamespace(host=host)) for host in ("a", "b")
    )
    pairs = [
        (
            network.Socket(net, a, net.line("a", "b"), "b"),
            network.Socket(net, b, net.line("b", "a"), "a"),
        )
        for _ in range(connections)
    ]
    for one, other in pairs:
        one.peer, other.peer = other, one

    def send():
        for number in range(20):
            pairs[number % connections][0].send(b"x" * 1000)

    def receive():
        for _, end in pairs:
            left = 20_000 // connections
            while left:
                left -= end.recv_into(memoryview(bytearray(left)))
        here.is_over = True

    a.start(send)
    b.start(receive)
    here.run(100)
    assert here.now == pytest.approx(LATENCY + 20_000 / RATE)
