"""Clusters of one run with a quorum: real links over loopback, all in one process."""

import concurrent.futures
import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import links
import numpy as np
from breakable_line import Proxy
from two_labs import wait_until

from nebula_jax.communication import bridge
from nebula_jax.communication.wire import activity, frames
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.parallel.local_steps import settings as settings_lib
from nebula_jax.parallel.local_steps.quorum import hub as hub_lib
from nebula_jax.parallel.local_steps.quorum import leaf as leaf_lib
from nebula_jax.training import diloco

NAMES = ["cluster:0", "cluster:1", "cluster:2"]
HUB = NAMES[0]
CONFIG = diloco.Config(inner_steps=4, fragments=2, delay=1)
"""Fragment 1 is sent after steps 2, 6, 10, ..., fragment 0 after 4, 8, 12, ..."""
SECONDS = 5.0
LIMIT = 30.0  # seconds for what comes soon, unless the machine stands still


def params(seed=0):
    random = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    return {
        "embeddings": {"table": array(5, 4)},
        "encoder": {f"layer_{k}": {"kernel": array(4, 4)} for k in range(2)},
    }


def parts(own, fragments=2):
    """Returns the fragments of parameters."""
    return diloco.split(own, diloco.places(own, fragments))


def inner_step(own, name, step):
    """Returns parameters after an inner step, different in every cluster."""
    change = params(100 * NAMES.index(name) + step)
    return jax.tree.map(lambda a, b: a + 0.1 * b, own, change)


def assert_alike(*clusters):
    """Asserts that clusters have the same anchors, bit for bit."""
    assert len({tuple(each.digests()) for each in clusters}) == 1


def member(name, codec="", config=CONFIG):
    given = dataclasses.asdict(config) | {"codec": codec}
    return member_lib.Member(settings_lib.Settings(**given), NAMES, name, params())


class Cluster:
    """A cluster's loop, as `experiments/bert/cluster.py` has it."""

    def __init__(self, name, end, start=0):
        self.name, self.end = name, end
        self.step, self.params, self.heads = start, params(), []

    def to(self, last, is_requested=lambda: False):
        """Takes inner steps until `last`, or further if it has to skip some."""
        while self.step < last:
            self.step += 1
            own = inner_step(self.params, self.name, self.step)
            [self.params], heads = self.end.after(self.step, [own], is_requested)
            self.heads += heads
            self.step = max(self.step, self.end.step)

    def finish(self):
        [self.params] = self.end.finish(self.step, [self.params])

    @property
    def member(self):
        return self.end._member

    def digests(self):
        count = self.member.config.fragments
        return [self.member.digest(each).tobytes() for each in range(count)]


class Star:
    """A hub and its leaves; each is advanced by the test, in any order."""

    def __init__(
        self,
        stack,
        quorum=2,
        grace=0.0,
        timeout=SECONDS,
        start=0,
        saved=None,
        is_begun=True,
        peer_timeout=SECONDS,
        **more,
    ):
        """Connects all; `saved` has the steps that a leaf could go on from."""
        self.stack, self.log, self._more = stack, [], more
        self._settings = {"peer_timeout": peer_timeout, "reconnect_timeout": SECONDS}
        self._settings |= {"tls": None, "log": self.log.append}
        self._pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(4))
        work = activity.Work(more.pop("stuck_timeout", 60.0))
        self._listener = stack.enter_context(
            links.listening(
                HUB, clusters=NAMES[1:], may_return=True, work=work, **self._settings
            )
        )
        self.proxies = {name: Proxy(self._listener.address) for name in NAMES[1:]}
        for each in self.proxies.values():
            stack.callback(each.close)
        saved = saved or {}
        coming = {
            name: self._coming(name, saved.get(name, (start,) if start else ()))
            for name in NAMES[1:]
        }
        there = {}
        for _ in coming:
            link = self._listener.accept(LIMIT)
            there[link.peer.cluster] = link
        self.links = {name: each.result(LIMIT) for name, each in coming.items()}
        end = hub_lib.Hub(
            member(HUB, **more),
            NAMES,
            HUB,
            there,
            hub_lib.Rule(quorum, grace, timeout),
            rejoined=self._newcomer,
            work=work,
            log=self.log.append,
        )
        stack.callback(self._abort)
        self.clusters = {HUB: Cluster(HUB, end, start)}
        leaves = {name: self._leaf(name) for name in NAMES[1:]}
        if is_begun:
            end.begin(start)
        for name, leaf in leaves.items():
            steps = saved.get(name, (start,))
            if is_begun and start in (0, *steps):
                assert leaf.begin(LIMIT, steps) == start
            self.clusters[name] = Cluster(name, leaf, start)

    def _coming(self, name, saved=()):
        hello = frames.Hello(name, "0.1", {}, tuple(saved))
        more = self._settings | {"connect_timeout": LIMIT, "work": activity.Work(60.0)}
        address = self.proxies[name].address
        return self._pool.submit(links.dial, address, hello, HUB, **more)

    def _newcomer(self):
        with contextlib.suppress(bridge.NobodyThere):
            return self._listener.accept(0.0)
        return None

    def _leaf(self, name):
        made = member(name, **self._more)
        return leaf_lib.Leaf(made, NAMES, name, self.links[name])

    def _abort(self):
        ours = [leaf.link for leaf in self.clusters[HUB].end._leaves.values()]
        for link in (*self.links.values(), *ours):
            link.abort("the test is over")

    def __getitem__(self, number):
        return self.clusters[NAMES[number]]

    def together(self, last, numbers=(0, 1, 2), is_requested=lambda: False):
        """Advances some clusters step by step, as if they had one speed."""
        for step in range(self[0].step + 1, last + 1):
            fragment = CONFIG.applied_after(step)
            if fragment is not None:
                self.have_arrived(step - CONFIG.delay, fragment, len(numbers))
            for number in sorted(numbers):  # the hub first: the others wait for it
                self[number].to(step, is_requested)

    def have_arrived(self, step, fragment, count):
        """Waits until the hub has so many messages of a round, its own included."""
        hub = self[0].end
        wait_until(lambda: hub.poll(step, fragment) or len(hub._taken) >= count)

    def finish(self, numbers=(0, 1, 2)):
        """Takes the last rounds, each cluster in a thread; these are the quorum."""
        hub = self[0].end
        hub._rule = dataclasses.replace(hub._rule, quorum=len(numbers))
        ends = [self._pool.submit(self[number].finish) for number in numbers]
        for each in ends:
            each.result(LIMIT)

    def arrive(self, number):
        """Waits until a leaf has a verdict that it is to act on."""
        end = self[number].end._log._down.verdicts
        wait_until(lambda: end.next_step is not None)

    def kill(self, number):
        """Ends the process of a leaf, whose connection breaks."""
        name = NAMES[number]
        self.links[name]._driver.give_up("killed")
        self.proxies[name].cut()

    def start_anew(self, number, is_hub_waiting=False):
        """Starts the process of a leaf again, with nothing of its former one; returns
        the leaf when the hub has it, or is to find it at its next look."""
        name = NAMES[number]
        self.links[name] = self._coming(name).result(LIMIT)
        leaf = self.clusters[name] = Cluster(name, self._leaf(name))
        if not is_hub_waiting:
            wait_until(lambda: not self._listener._came.empty())
        return leaf
