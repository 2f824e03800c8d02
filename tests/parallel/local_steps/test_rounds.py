"""The exchange of messages among clusters: all to all, and through a hub."""

import concurrent.futures
import itertools
import threading

import jax
import links
import numpy as np
import pytest
from two_labs import wait_until

from nebula_jax import errors, trace
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import loopback, ranks, selector, worker_link
from nebula_jax.communication.wire import receive_queue
from nebula_jax.parallel.local_steps import rounds

SPECS = [
    {"x": jax.ShapeDtypeStruct((3,), np.float32)},
    {"y": jax.ShapeDtypeStruct((2, 2), np.float32)},
]


def exchanges(count: int, hub: str = "") -> dict[str, rounds.Exchange]:
    """Returns every cluster's end, over loopbacks."""
    names = [f"cluster:{k}" for k in range(count)]
    links: dict[str, dict[str, loopback.End]] = {name: {} for name in names}
    for one, two in itertools.combinations(names, 2):
        if not hub or hub in (one, two):
            links[one][two], links[two][one] = loopback.ends()
    return {
        name: rounds.Exchange(
            names, name, links[name], SPECS, codec_lib.identity(), hub=hub
        )
        for name in names
    }


def message(cluster: int, step: int, fragment: int):
    ((name, leaf),) = SPECS[fragment].items()
    value = np.full(leaf.shape, 100 * cluster + step, leaf.dtype)
    return selector.Selected({name: value})


@pytest.mark.parametrize(
    ("count", "hub"), [(2, ""), (4, ""), (2, "cluster:0"), (4, "cluster:2")]
)
def test_every_cluster_gets_the_message_of_every_other(count, hub):
    ends = exchanges(count, hub)
    for step, fragment in [(5, 1), (10, 0), (15, 1)]:
        own = [message(k, step, fragment) for k in range(count)]
        for each, payload in zip(ends.values(), own, strict=True):
            each.send(step, fragment, payload)
        order = sorted(ends, key=lambda name: name != hub)  # in one thread, it is first
        for name in order:
            ends[name].poll(step, fragment)
            payload = own[list(ends).index(name)]
            received = ends[name].receive(step, fragment, payload)
            for got, sent in zip(received, own, strict=True):
                jax.tree.map(np.testing.assert_array_equal, got, sent)


def test_a_poll_takes_what_has_arrived_and_waits_for_nothing():
    ends = exchanges(3)
    one, two, three = ends.values()
    one.poll(4, 0)  # nobody has sent
    two.send(4, 0, message(1, 4, 0))
    one.poll(4, 0)
    with pytest.raises(errors.NebulaError, match="has sent delta 0 of cluster:2"):
        one.receive(4, 0, message(0, 4, 0))
    three.send(4, 0, message(2, 4, 0))
    received = one.receive(4, 0, message(0, 4, 0))
    assert [float(each.payload["x"][0]) for each in received] == [4.0, 104.0, 204.0]


def test_a_poll_leaves_what_is_of_another_round():
    """As the last rounds of a run, from a cluster that is ahead."""
    ends = exchanges(2)
    one, two = ends.values()
    two.send(4, 0, message(1, 4, 0))
    one.poll(6, 0)  # the next one if the run did not end
    own = message(0, 4, 0)
    one.send(4, 0, own)
    (_, received) = one.receive(4, 0, own)
    np.testing.assert_array_equal(received.payload["x"], message(1, 4, 0).payload["x"])


def test_a_hub_passes_on_what_it_has_polled():
    ends = exchanges(3, hub="cluster:0")
    hub, two, three = ends.values()
    two.send(4, 1, message(1, 4, 1))
    with pytest.raises(errors.NebulaError, match="nobody has sent"):
        three.receive(4, 1, message(2, 4, 1))
    hub.poll(4, 1)
    hub.send(4, 1, message(0, 4, 1))
    received = three.receive(4, 1, message(2, 4, 1))
    assert [float(each.payload["y"][0, 0]) for each in received] == [4.0, 104.0, 204.0]


def test_a_message_of_another_round_is_an_error():
    one, two = exchanges(2).values()
    two.send(4, 0, message(1, 4, 0))
    with pytest.raises(errors.NebulaError, match=r"step 4.*expected step 8"):
        one.receive(8, 0, message(0, 8, 0))


NAMES = [f"cluster:{k}" for k in range(6)]
LARGE = {"x": jax.ShapeDtypeStruct((1 << 18,), np.float32)}  # not read at once
SENT = [selector.Selected({"x": np.full(1 << 18, k, np.float32)}) for k in range(6)]


@pytest.fixture
def a_line(monkeypatch, stack):
    """The links of a hub and of its leaf, which keep no more than one tensor unread."""
    monkeypatch.setattr(receive_queue, "MAX_TENSORS", 1)
    monkeypatch.setattr(receive_queue, "MAX_BYTES", 1)
    monkeypatch.setattr(receive_queue, "FLOOD_BYTES", 1)
    server, client = {"ours": NAMES[0]}, {"theirs": NAMES[1], "peer": NAMES[0]}
    pair = links.Pair(stack, server, client, reconnect_timeout=5.0)
    return pair.here, pair.there


def over(link, own, peer):
    """Returns an end of the star of NAMES, over one line of it."""
    lines, codec = {peer: link}, codec_lib.identity()
    return rounds.Exchange(NAMES, own, lines, [LARGE], codec, hub=NAMES[0])


def assert_sent(received):
    for got, expected in zip(received, SENT, strict=True):
        np.testing.assert_array_equal(got.payload["x"], expected.payload["x"])


@pytest.fixture
def process(monkeypatch):
    """A cluster of two processes, each a thread: `process(rank)` makes one of it."""
    own, meeting, board = threading.local(), threading.Barrier(2), [None, None]

    def count():
        return 2 if hasattr(own, "rank") else 1

    def of_all(value):
        if count() == 1:
            return [value]
        board[own.rank] = value
        meeting.wait(10.0)  # an error if one of them takes another way
        found = list(board)
        meeting.wait(10.0)
        return found

    for name, function in {
        "count": count,
        "rank": lambda: getattr(own, "rank", 0),
        "exchange": lambda values: np.asarray(of_all(values), np.int64),
        "from_root": lambda arrays, like: of_all(arrays)[0],
        "everywhere": lambda arrays: arrays,
    }.items():
        monkeypatch.setattr(ranks, name, function)
    return lambda rank: setattr(own, "rank", rank)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_leaf_takes_what_comes_over_its_one_line_in_any_order(
    a_line, process, processes
):
    """Else what it does not wait for would keep the rest from being read. Of several
    processes, the root waits for its line, and all take what it has."""
    other, one = a_line
    worker = worker_link.WorkerLink(one.peer, trace.OFF)
    leaves = [over(link, NAMES[1], NAMES[0]) for link in (one, worker)]
    passing = over(other, NAMES[0], NAMES[1])
    other.welcome(0)
    one.wait_for_welcome(5.0)

    def received(rank):
        if processes > 1:
            process(rank)
            leaves[rank].poll(5, 0)  # does nothing: they would have to agree on it
        return leaves[rank].receive(5, 0, SENT[1])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        all_of_them = [pool.submit(received, rank) for rank in range(processes)]
        wait_until(lambda: one.work.waiting)
        for origin in (5, 4, 3, 2, 0):
            passing._pass_on(NAMES[origin], (5, 0), SENT[origin])
        for each in all_of_them:
            assert_sent(each.result(30.0))
