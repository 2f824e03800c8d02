"""Pace of several clusters: a simulation of any order in which they can run."""

import functools
import random
import types

import greenlet
import pytest

from nebula_jax.parallel import pace


def never():
    return False


def test_alone_takes_every_step_that_is_left():
    assert list(pace.alone(0, 4, never)) == [1, 2, 3, 4]
    assert list(pace.alone(2, 4, never)) == [3, 4]
    assert list(pace.alone(4, 4, never)) == []


def test_alone_stops_before_the_next_step():
    taken = []
    for step in pace.alone(0, 9, lambda: len(taken) == 2):
        taken.append(step)
    assert taken == [1, 2]
    assert list(pace.alone(0, 9, lambda: True)) == []


class Turns:
    """Greenlets of which one runs at a time, in an order drawn by a seed."""

    def __init__(self, seed):
        self._order, self._running = random.Random(seed), []
        self.between = []  # functions that may run whenever one pauses

    def add(self, work):
        """Adds one; work: (pause) -> None."""
        pause = greenlet.getcurrent().switch
        self._running.append(greenlet.greenlet(functools.partial(work, pause)))

    def run(self, most=20_000):
        for _ in range(most):
            self._running = [each for each in self._running if not each.dead]
            if not self._running:
                return
            for each in self.between:
                if self._order.random() < 0.5:
                    each()
            self._order.choice(self._running).switch()
        raise AssertionError(f"{self._running} wait for ever")


class Line:
    """A line whose messages arrive in order, some time after they are sent."""

    def __init__(self):
        self.to_follower, self.to_leader = [], []

    def deliver(self):
        """Lets the next message of each direction arrive."""
        if self.to_follower:
            kind, step = self.to_follower.pop(0)
            setattr(self.follower, kind, step)
        if self.to_leader:
            self.to_leader.pop(0)
            self.leader.stop_step = 0


class FollowerLink:
    """A follower's end of a line."""

    def __init__(self, line):
        self.line, self.pause = line, None
        self.token, self.stop_step = 0, None
        line.follower = self

    def wait_for_step(self, step):
        while self.token < step:
            self.pause()

    def stop(self):
        self.line.to_leader.append("stop")


class LeaderLink:
    """The leader's end of a line."""

    def __init__(self, line):
        self.line, self.stop_step = line, None
        self.peer = types.SimpleNamespace(cluster="b")
        line.leader = self

    def step_done(self, step):
        self.line.to_follower.append(("token", step))

    def stop(self, step):
        self.line.to_follower.append(("stop_step", step))


def simulate(window, steps, seed, *, stopper=None, stop_at=0, start=0, is_chain=False):
    """Runs a leader and two followers, which need each other, in an order that `seed`
    draws; returns the steps that each took, the leader's first.

    A follower may be `window` steps ahead; the run goes on after step `start`. The end
    is requested of `stopper` (0: the leader) once all have taken `stop_at` steps
    together. In a chain the second follower follows the first.
    """
    turns, taken = Turns(seed), [[], [], []]
    lines = [Line(), Line()]
    leading = [LeaderLink(line) for line in lines]
    between = [leading.pop()] if is_chain else []

    def newest(number):
        return max([start, *taken[number]])

    def requested(number):
        return lambda: number == stopper and sum(map(len, taken)) >= stop_at

    def lead(pause):
        pace_ = pace.Lead(
            leading, start, steps, window, requested(0), lambda text: None
        )
        for step in pace_:
            while min(newest(1), newest(2)) < step:  # what it takes in comes from both
                pause()
            taken[0].append(step)
            pace_.done(step)
            pause()

    def follow(number, link, pause):
        link.pause, link.token = pause, start
        given = link, start, steps, window, requested(number)
        for step in pace.follow(*given, between if number == 1 else ()):
            assert step <= newest(0) + window + 1
            taken[number].append(step)
            pause()

    turns.add(lead)
    for number, line in enumerate(lines, start=1):
        turns.add(functools.partial(follow, number, FollowerLink(line)))
        turns.between.append(line.deliver)
    turns.run()
    return taken


each_window = pytest.mark.parametrize(
    ("window", "is_chain"), [(0, False), (1, False), (3, False), (0, True)]
)


@each_window
@pytest.mark.parametrize("start", [0, 5])
def test_undisturbed_clusters_take_all_steps(window, is_chain, start):
    for seed in range(2):
        taken = simulate(window, 12, seed, start=start, is_chain=is_chain)
        assert taken == [list(range(start + 1, 13))] * 3


@each_window
@pytest.mark.parametrize("stopper", [0, 1, 2], ids=["leader", "follower", "other"])
def test_after_a_stop_at_any_moment_all_end_at_the_same_step(window, is_chain, stopper):
    """No follower is past the last step when it learns of it."""
    ends = set()
    for stop_at in range(0, 39, 2):
        for seed in range(2):
            given = {"stopper": stopper, "stop_at": stop_at, "is_chain": is_chain}
            taken = simulate(window, 12, seed, **given)
            assert taken[0] == taken[1] == taken[2] == list(range(1, len(taken[0]) + 1))
            ends.add(len(taken[0]))
    assert min(ends) <= window + 2
    assert max(ends) == 12


def test_a_follower_never_goes_beyond_its_steps():
    """Whatever its leader names."""
    link = FollowerLink(Line())
    link.token, link.stop_step = 9, 7
    assert list(pace.follow(link, 2, 4, 0, lambda: False)) == [3, 4]


def test_a_stop_of_two_at_once_is_one_stop():
    """Both followers request it; the leader names one last step."""
    line, other = Line(), Line()
    links = [LeaderLink(line), LeaderLink(other)]
    FollowerLink(line), FollowerLink(other)
    said = []
    steps = pace.Lead(links, 0, 100, 2, never, said.append)
    for step in steps:
        if step == 4:
            links[0].stop_step = 0
        if step == 5:
            links[1].stop_step = 0
        steps.done(step)
    assert step == 3 + 2 + 1  # 3 had its token
    assert said == ["stopping, all clusters save step 6: b asked to stop"]
    for each in (line, other):
        assert [step for kind, step in each.to_follower if kind == "stop_step"] == [6]
        order = [kind for kind, step in each.to_follower]
        assert order.index("stop_step") == 3  # before the token of step 4
