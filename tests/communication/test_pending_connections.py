import pytest

from nebula_jax.communication import pending_connections
from nebula_jax.communication.wire import greeting


class Socket:
    def fileno(self):
        return 7


def come(room, host, count=1, **fields):
    new = [
        pending_connections.Pending(greeting.Connected(Socket()), host, 9.0, **fields)
        for _ in range(count)
    ]
    for each in new:
        room.add(each)
    return new


def test_who_has_most_loses_its_oldest():
    room = pending_connections.Pool(10)
    assert room.to_go(()) is None
    few, many = come(room, "10.0.0.1", 2), come(room, "10.0.0.2", 3)
    assert room.to_go(()) is many[0]
    room.remove(many[0])
    room.remove(many[1])
    assert room.to_go(()) is few[0]


def test_it_is_full_at_its_bound():
    room = pending_connections.Pool(3)
    first, *_ = come(room, "10.0.0.1", 3)
    assert room.is_full
    assert room.oldest is first
    room.remove(first)
    assert not room.is_full
    assert first not in room


def test_a_known_peers_address_keeps_its_places_in_a_flood_of_addresses():
    room = pending_connections.Pool(100)
    come(room, "10.0.0.1", pending_connections.KEPT)
    strangers = [come(room, f"10.0.1.{index}")[0] for index in range(5)]
    for stranger in strangers:
        assert room.to_go({"10.0.0.1"}) is stranger
        room.remove(stranger)
    come(room, "10.0.1.9")
    come(room, "10.0.0.1")
    assert room.to_go({"10.0.0.1"}).host == "10.0.0.1"  # beyond what is kept


def test_who_is_expected_goes_last():
    room = pending_connections.Pool(10)
    expected = come(room, "10.0.0.1", 2, is_expected=True)
    stranger, _ = come(room, "10.0.0.1", 2)
    assert room.to_go(()) is stranger
    room.remove(stranger)
    room.remove(room.to_go(()))
    assert room.to_go(()) is expected[0]


def test_turns_go_to_the_expected_the_cheap_the_known_the_rare_and_the_newest():
    room = pending_connections.Pool(100)
    flood = come(room, "10.0.0.9", 3, has_begun=True)
    known = come(room, "10.0.0.1", 4, has_begun=True)
    rare = come(room, "10.0.0.2", 1, has_begun=True)
    cheap = come(room, "10.0.0.9", 2)
    expected = come(room, "10.0.0.9", 1, is_expected=True, has_begun=True)
    turns = room.in_turn([*flood, *known, *rare, *cheap, *expected], {"10.0.0.1"})
    assert turns == [*expected, *cheap[::-1], *known[::-1], *rare, *flood[::-1]]


@pytest.mark.parametrize(
    ("hosts", "is_one"),
    [
        (["2001:db8::1", "2001:db8::ffff:1"], True),
        (["2001:db8::1", "2001:db8:0:1::1"], False),
        (["::ffff:10.0.0.1", "10.0.0.1"], True),
        (["::ffff:10.0.0.1", "::ffff:10.0.0.2"], False),
        (["fe80::1%eth0", "fe80::2%eth0"], True),
        (["10.0.0.1", "10.0.0.2"], False),
    ],
)
def test_an_owner_of_many_addresses_is_one(hosts, is_one):
    assert (len({pending_connections.group(host) for host in hosts}) == 1) == is_one


def test_many_lines_become_one_with_their_count():
    said, burst = [], pending_connections.LOG_BURST
    log = pending_connections.RejectedLog(said.append)
    for number in range(1000):
        log.add(f"line {number}", now=5.0)
    assert said == [f"line {number}" for number in range(burst)]
    assert log.add("another", now=70.0) == 1000 - burst
    assert said[-1] == f"another (and {1000 - burst} others before it)"


def test_what_is_not_logged_at_the_end_is_counted():
    said = []
    log = pending_connections.RejectedLog(said.append, burst=1)
    for number in range(3):
        log.add(f"line {number}", now=5.0)
    log.flush()
    log.flush()
    assert said == ["line 0", "and 2 more connections like these"]
