"""Clusters in threads, which meet over real sockets; each starts when it likes."""

import collections
import concurrent.futures
import dataclasses
import random
import re
import threading
import time

import jax
import numpy as np
import ports
import pytest
from breakable_line import Proxy
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication import bridge, codec, endpoints, ranks
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import frames, session
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.security.tls import certificates

joined = all_clusters.connected
NAMES = ["a", "b", "c", "d", "e"]
SPEC = jax.ShapeDtypeStruct((2,), np.float32)
SECONDS = 30.0  # for what none of these tests may come to
SOON = 10.0  # seconds, on a busy machine; without what is tested it is SECONDS


def hello(name, checkpoints=(), steps=9):
    return frames.Hello(name, "1", {"--steps": steps}, tuple(checkpoints))


class Run:
    """Clusters of one run, each in a thread."""

    def __init__(self, names, hub="", tls=None, **common):
        self.names, self.hub, self._tls, self._common = list(names), hub, tls, common
        where = [f"127.0.0.1:{ports.free_port()}" for _ in self.names]
        self.where = dict(zip(self.names, where, strict=True))
        self.results = {}
        wait_until(lambda: not links_open())  # of the test before

    def settings(self, name, **more):
        """How a cluster meets the peers."""
        dialed = all_clusters.dialed(name, self.names, self.hub)
        values = {
            "listen": self.where[name],
            "peer": ",".join(self.where[each] for each in dialed),
            "tls": str(self._tls / name) if self._tls else "off",
            "connect_timeout": SECONDS,
            "reconnect_timeout": SECONDS,
        }
        return connect.Settings(**values | self._common | more)

    def start(self, names, body, own=None, may_return=False, **more):
        """Starts clusters, one after the other: `body` gets what `connected` yields."""
        options = {"hub": self.hub, "may_return": may_return}

        def run(settings, hello, future):
            try:
                with joined(settings, hello, self.names, **options) as peers:
                    result = body(peers)
                future.set_result(result)
            except BaseException as error:
                future.set_exception(error)

        for name in names:
            future = self.results[name] = concurrent.futures.Future()
            given = self.settings(name, **more), own or hello(name), future
            # Not one of a pool, which would wait at the end for one that hangs.
            threading.Thread(target=run, args=given, daemon=True).start()

    def result(self, name):
        """What the body returned, or the error that it ended with; it is there soon."""
        try:
            return self.results[name].result(SOON)
        except errors.NebulaError as error:
            return error

    def wait_for_links(self, count):
        """Waits for ends of connections; fails with the error of one that ends."""
        for _ in range(int(SECONDS / 0.02)):
            if links_open() >= count:
                return
            for future in self.results.values():
                assert not future.done(), future.exception()
            time.sleep(0.02)
        raise AssertionError(f"{links_open()} ends of {count}")

    def all(self):
        """The results of all; they are there soon."""
        concurrent.futures.wait(self.results.values(), SOON)
        assert all(each.done() for each in self.results.values()), self.results
        return {name: self.result(name) for name in self.results}

    def line_to(self, name):
        """A line to a cluster that may break, and `peer` for those that take it."""
        line = Proxy(endpoints.host_and_port("listen", self.where[name]))
        return line, endpoints.written(line.address)


def began(peers):
    """Goes on after the step that all agree on."""
    return all_clusters.agree_start(peers, 10, 0, SECONDS)


def exchanged(peers):
    """Sends a number to each of the peers; the numbers that they sent."""
    own = float(ord(peers.hello.cluster))
    ends = {
        name: (link.sender("x", SPEC, IDENTITY), link.receiver("x", SPEC, IDENTITY))
        for name, link in peers.links.items()
    }
    began(peers)
    for sender, _ in ends.values():
        sender.send(1, jax.device_put(np.full(SPEC.shape, own, np.float32)))
    return {
        name: chr(int(np.asarray(receiver.recv(1))[0]))
        for name, (_, receiver) in ends.items()
    }


IDENTITY = codec.identity()


@pytest.mark.parametrize(
    ("count", "seed", "hub"),
    [(1, 0, ""), (2, 0, "b"), (2, 1, ""), (3, 1, ""), (5, 0, ""), (5, 1, "b")],
)
def test_clusters_meet_in_whatever_order_they_start(count, seed, hub):
    run = Run(NAMES[:count], hub)
    order = random.Random(seed).sample(run.names, count)
    for name in order:
        run.start(name, exchanged)
        time.sleep(random.Random(seed).uniform(0.0, 0.1))
    for name, found in run.all().items():
        met = [each for each in run.names if each != name]
        if hub and name != hub:
            met = [hub]
        assert list(found) == list(found.values()) == met, found


def test_who_dials_whom():
    assert all_clusters.dialed("c", NAMES) == ["a", "b"]
    assert all_clusters.awaited("c", NAMES) == ["d", "e"]
    assert all_clusters.dialed("a", NAMES, hub="c") == ["c"]
    assert all_clusters.dialed("c", NAMES, hub="c") == []
    assert all_clusters.awaited("c", NAMES, hub="c") == ["a", "b", "d", "e"]
    assert all_clusters.dialed("all", NAMES) == []
    with pytest.raises(errors.SettingsError, match="hub=z: the clusters are a, b"):
        all_clusters.dialed("a", NAMES, hub="z")


@pytest.mark.parametrize(
    ("cluster", "hub", "values", "words"),
    [
        ("a", "", {"listen": "h:1"}, None),
        ("b", "", {"listen": "h:1", "peer": "h:1"}, None),
        ("c", "", {"peer": "h:1,[::1]:2"}, None),  # the last one does not listen
        ("a", "b", {"peer": "h:1"}, None),
        ("b", "b", {"listen": "h:1"}, None),
        ("all", "", {}, None),
        ("all", "b", {"tls": "auto"}, None),
        ("a", "", {}, "cluster=a needs listen=HOST:PORT"),
        ("b", "", {"peer": "h:1"}, "cluster=b needs listen=HOST:PORT"),
        ("a", "", {"listen": "h:1", "peer": "h:1"}, "cluster=a dials no other one"),
        ("all", "", {"peer": "h:1"}, "peer=h:1: cluster=all dials no other one"),
        ("b", "b", {"listen": "h:1", "peer": "h:1"}, "cluster=b dials no other"),
        ("c", "", {"peer": "h:1"}, "peer=HOST:PORT,... with 2 addresses, of a, b"),
        ("c", "b", {"peer": "h:1,h:2"}, "with 1 address, of b in this order; it has 2"),
        ("b", "", {"listen": "h:1"}, "needs peer=HOST:PORT with 1 address, of a in"),
        ("a", "d", {}, "hub=d: the clusters are a, b, c"),
        ("c", "", {"peer": "h:1,h:2", "tls": "auto"}, "needs tls=FOLDER with its"),
        ("c", "", {"peer": "h:1,h:2", "tls": "/nowhere"}, "/nowhere"),
    ],
)
def test_a_cluster_must_have_what_it_needs_to_meet_the_others(
    cluster, hub, values, words
):
    settings = connect.Settings(**values)
    if words is None:
        all_clusters.check_place(settings, cluster, NAMES[:3], hub)
        return
    with pytest.raises(errors.NebulaError, match=re.escape(words)):
        all_clusters.check_place(settings, cluster, NAMES[:3], hub)


@pytest.mark.parametrize("hub", ["", "c"])
def test_all_go_on_after_the_newest_step_that_all_have(hub):
    run = Run(NAMES[:3], hub)
    saved = {"a": [10, 20, 30], "b": [10, 20], "c": [10, 20, 40]}
    for name, steps in saved.items():
        run.start(name, began, hello(name, steps))
    assert run.all() == {"a": 20, "b": 20, "c": 20}


def test_a_cluster_that_would_go_on_after_another_step_is_named():
    run = Run(NAMES[:2])
    run.start("a", began, hello("a", [10]))

    def other_steps(peers):
        peers.hello = dataclasses.replace(peers.hello, checkpoints=())
        return began(peers)

    run.start("b", other_steps, hello("b", [10]))
    found = run.all()
    assert isinstance(found["b"], bridge.Mismatch)
    assert str(found["b"]) == "a goes on after step 10, b after step 0"
    assert str(found["a"]) == f"b gave up: {found['b']}"


@pytest.mark.parametrize("is_cut", [False, True])
def test_checkpoints_that_must_not_be_given_up_end_all(is_cut):
    """Also one that has not reached all yet, and dials one that ends meanwhile."""
    run = Run(NAMES[:3])
    proxy, a = run.line_to("a")
    proxy.refuse(is_cut)
    run.start("b", began, hello("b", [80]), peer=a)
    for name in "ac":
        run.start(name, began, hello(name, [90]))
    for error in run.all().values():
        assert "no step is saved in all clusters (a has 90; b has 80; c" in str(error)
    proxy.close()


def links_open():
    """Both ends of every connection in this process."""
    return sum(each.name == "bridge" for each in threading.enumerate())


def status(error):
    """The exit status of a process that ends with an error."""

    def fail():
        raise error

    return process.guarded(fail)


@pytest.mark.parametrize(
    ("missing", "hub"), [("a", ""), ("b", ""), ("c", ""), ("a", "b"), ("b", "b")]
)
def test_who_did_not_come_is_named_and_all_end_in_time(missing, hub):
    run = Run(NAMES[:3], hub, connect_timeout=1.5)
    there = [name for name in run.names if name != missing]
    run.start(there, began)
    found = run.all()
    for name, error in found.items():
        assert status(error) == process.ENDED_BY_PEER, error
        assert re.search(rf"\b{missing}\b", str(error)), (name, error)


def test_the_error_names_all_that_are_missing_and_why():
    run = Run(NAMES, connect_timeout=0.3)
    run.start("c", began)
    a, b = run.where["a"], run.where["b"]
    assert str(run.result("c")) == (
        f"a (nobody answers at {a}: Connection refused), b (nobody answers at {b}:"
        " Connection refused), d, e did not come within 0.3 s (connect_timeout)"
    )


@pytest.mark.parametrize("hub", ["", "a"])
def test_one_with_other_settings_ends_all_soon(hub):
    run = Run(NAMES, hub)
    run.start("abce", began)
    run.wait_for_links(2 * (3 if hub else 6))
    run.start("d", began, hello("d", steps=5))
    found = run.all()
    for name, error in found.items():
        assert isinstance(error, errors.NebulaError), (name, error)
    assert isinstance(found["d"], bridge.Mismatch)
    assert any("d has --steps=5" in str(found[name]) for name in "abce")


def test_addresses_in_the_wrong_order_are_found_on_both_sides():
    run = Run(NAMES[:3])
    run.start("ab", began)
    run.wait_for_links(2)  # or a is told nothing
    run.start("c", began, peer=f"{run.where['b']},{run.where['a']}")
    found = run.all()
    words = f"b answers at {run.where['b']}, where a should (peer)"
    assert str(found["c"]) == words
    assert str(found["b"]) == f"c gave up: {words}"
    assert str(found["a"]).endswith(words)


def test_one_that_gives_up_ends_all_with_its_reason():
    run = Run(NAMES)
    run.start("a", began)
    run.start("b", began, connect_timeout=4.0)
    run.start("c", began)
    run.wait_for_links(6)
    run.start("e", began)  # which d keeps from having all that it is to dial
    found = run.all()
    assert str(found["b"]) == "d did not come within 4 s (connect_timeout)"
    for name in "ace":
        assert str(found[name]).endswith(f"gave up: {found['b']}")
        assert isinstance(found[name], session.PeerAborted)


def test_one_that_dies_while_another_is_dialed_ends_the_dialing():
    """Or it would go on for --connect_timeout, and blame one that may yet come."""
    run = Run(NAMES[:3])
    proxy, a = run.line_to("a")
    run.start("a", began, connect_timeout=4.0)
    run.start("c", began, peer=f"{a},{run.where['b']}", reconnect_timeout=0.2)
    run.wait_for_links(2)
    time.sleep(0.2)  # b is dialed now
    proxy.go_down()
    error = run.result("c")
    assert isinstance(error, session.PeerGone)
    assert "a" in str(error)
    run.all()
    proxy.close()


def test_a_killed_cluster_may_rejoin_while_others_wait():
    run = Run(NAMES[:3])
    proxy, a = run.line_to("a")
    run.start("a", began)
    run.start("b", began, peer=a, reconnect_timeout=0.1)
    run.wait_for_links(2)
    proxy.go_down()
    assert isinstance(run.result("b"), session.PeerGone)
    run.start("bc", began)
    assert run.all() == {"a": 0, "b": 0, "c": 0}
    proxy.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("credentials")
    certificates.issue_for_run(folder, NAMES)
    return folder


def test_clusters_meet_inside_tls(folder):
    run = Run(NAMES[:3], tls=folder)
    for name in run.names:
        all_clusters.check_place(run.settings(name), name, run.names)
        run.start(name, exchanged)
    assert run.all()["b"] == {"a": "a", "c": "c"}


def test_an_error_in_one_cluster_ends_all_with_its_reason():
    run, all_there = Run(NAMES), threading.Barrier(5)

    def body(peers):
        began(peers)
        all_there.wait(SECONDS)
        if peers.hello.cluster == "c":
            raise errors.NebulaError("the disk is full")

    run.start(NAMES, body)
    found = run.all()
    for name, error in found.items():
        assert str(error).endswith("the disk is full"), (name, error)
        assert name == "c" or isinstance(error, session.PeerAborted)


def test_an_abort_that_takes_long_keeps_nobody_waiting(monkeypatch):
    """As of a host that was lost: its Abort cannot be delivered."""
    abort, there, c_has_ended = Link.abort, threading.Barrier(3), threading.Event()
    waited = []

    def slow(self, reason):
        if self.peer.cluster == "b":
            waited.append(c_has_ended.wait(SECONDS))
        abort(self, reason)

    monkeypatch.setattr(Link, "abort", slow)
    run = Run(NAMES[:3])

    def body(peers):
        began(peers)
        there.wait(SECONDS)
        if peers.hello.cluster == "a":
            raise errors.NebulaError("no more")
        try:
            peers.links["a"].wait_for_step(1)
        finally:
            if peers.hello.cluster == "c":
                c_has_ended.set()

    run.start(run.names, body)
    run.all()
    assert waited
    assert all(waited)


# Clusters that rejoin.


class Hub:
    """A hub that looks for newcomers until it is told to end."""

    def __init__(self, run, may_return=True):
        self.peers, self.came = None, []
        self._end, self._is_there = threading.Event(), threading.Event()
        run.start("a", self._body, may_return=may_return)

    def _body(self, peers):
        began(peers)
        self.peers = peers
        self._is_there.set()
        while not self._end.wait(0.01):
            link = peers.rejoined()
            if link is not None:
                link.welcome(7)
                self.came.append(link)

    def there(self):
        assert self._is_there.wait(SECONDS)
        return self.peers

    def wait_for(self, count):
        wait_until(lambda: len(self.came) == count)

    def end(self):
        self._end.set()


until_end = began  # a spoke's: its block waits for the hub's End


@pytest.mark.parametrize("is_away", [False, True])
def test_a_killed_cluster_rejoins_the_hub(is_away, monkeypatch):
    said = []
    monkeypatch.setattr(process, "message", said.append)
    run = Run(NAMES[:3], hub="a")
    hub = Hub(run)
    proxy, a = run.line_to("a")
    has_begun = threading.Event()

    def until_gone(peers):
        began(peers)
        has_begun.set()
        peers.links["a"].wait_for_step(100)  # which never comes

    run.start("b", until_gone, peer=a)
    run.start("c", until_end)
    former = hub.there().links["b"]
    assert has_begun.wait(SECONDS)
    kept = hub.peers.links["c"]
    if is_away:
        proxy.go_down()
        wait_until(lambda: former.is_away)
    killed = run.results["b"]
    run.start("b", until_end)  # a new process, in place of the former one
    hub.wait_for(1)
    assert former.was_lost
    with pytest.raises(session.PeerGone, match="b was started anew"):
        former.wait_for_step(1)
    assert list(hub.peers.links) == ["b", "c"]
    assert hub.peers.links == {"b": hub.came[0], "c": kept}
    proxy.refuse(False)
    with pytest.raises(session.PeerAborted):  # two of one cluster cannot be
        killed.result(SECONDS)
    hub.end()
    assert run.all() == {"a": None, "b": 7, "c": 0}
    assert "b has rejoined" in said
    assert all_clusters.PLAIN_RETURN in said
    proxy.close()


def test_the_hub_ends_without_those_that_are_gone():
    run = Run(NAMES[:3], hub="a", reconnect_timeout=0.2)
    hub = Hub(run)
    there = threading.Event()

    def killed(peers):
        began(peers)
        there.set()
        raise errors.NebulaError("killed")

    run.start("b", killed)
    run.start("c", until_end)
    assert there.wait(SECONDS)
    wait_until(lambda: hub.there().links["b"].is_over)
    hub.end()
    found = run.all()
    assert (found["a"], found["c"]) == (None, 0)


def test_a_newcomer_whose_settings_differ_does_not_end_the_run(monkeypatch):
    """If the place is free: then they are compared as it is taken."""
    said = []
    monkeypatch.setattr(process, "message", said.append)
    run = Run(NAMES[:2], hub="a", reconnect_timeout=0.1)
    hub = Hub(run)
    run.start("b", lambda peers: (began(peers), peers.links["a"].abort("killed")))
    wait_until(lambda: hub.there().links["b"].is_over)
    run.result("b")
    run.start("b", until_end, hello("b", steps=5))
    assert isinstance(run.result("b"), bridge.Mismatch)
    wait_until(lambda: any("rejoined" in line for line in said))
    run.start("b", until_end)
    hub.wait_for(1)
    hub.end()
    assert run.all() == {"a": None, "b": 7}


def test_without_leave_no_cluster_rejoins():
    run = Run(NAMES[:2], hub="a")
    hub = Hub(run, may_return=False)
    run.start("b", until_end)
    hub.there()
    refused = pytest.raises(session.PeerAborted, match="b is here already")
    with refused, joined(run.settings("b"), hello("b"), run.names, hub="a"):
        pass
    hub.end()
    assert run.all() == {"a": None, "b": 0}
    assert not hub.came


def test_clusters_rejoin_a_hub_alone():
    refused = pytest.raises(errors.SettingsError, match="rejoin a hub alone")
    with refused, joined(connect.Settings(), hello("a"), NAMES[:2], may_return=True):
        pass


# Clusters of many processes, and labs.


def test_the_root_shares_its_links_in_the_order_of_the_clusters(monkeypatch):
    """Whoever came first: the other processes have to take part in the same order."""
    shared = collections.defaultdict(list)

    def share(peer):
        shared[threading.get_ident()].append(peer.cluster)

    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr(ranks, "agree", lambda value: value)
    monkeypatch.setattr(connect, "share_peer", share)
    run = Run(NAMES[:4])

    def body(peers):
        began(peers)
        return shared[threading.get_ident()]

    for name in ("a", "d", "c", "b"):
        run.start(name, body)
        time.sleep(0.1)
    for name, order in run.all().items():
        assert order == [each for each in run.names if each != name]


def test_another_process_takes_what_the_root_shares(monkeypatch):
    hellos = [hello("a"), hello("b"), hello("d"), hello("e")]
    came = iter(hellos)
    monkeypatch.setattr(ranks, "is_root", lambda: False)
    monkeypatch.setattr(ranks, "agree", lambda value: 30)  # the root's
    monkeypatch.setattr(connect, "share_peer", lambda peer: next(came))
    with joined(connect.Settings(), hello("c"), NAMES) as peers:
        assert list(peers.links) == ["a", "b", "d", "e"]
        assert [link.peer for link in peers.links.values()] == hellos
        assert began(peers) == 30


def test_clusters_of_two_labs_meet_at_their_switches(labs):
    run = Run(NAMES[:3], job="mesh", listen="127.0.0.1:0", peer="")
    for name, lab in {"a": labs.s, "b": labs.t, "c": labs.t}.items():
        folder = str(lab.folder.path)
        run.start(name, exchanged, federation=folder)
        settings = run.settings(name, federation=folder)
        all_clusters.check_place(settings, name, run.names)
    assert run.all()["b"] == {"a": "a", "c": "c"}
