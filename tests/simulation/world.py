"""Virtual time, and the tasks that live in it: one heap of events, one real thread.

A task is what production code takes for a thread: a greenlet that runs until it waits.
Nothing here depends on the hour, on the machine or on the order of a set: a seed gives
the same events again.
"""

import collections
import heapq
import itertools
import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import greenlet

MOST_AT_ONCE = 5_000  # events without time going on: somebody spins
MOST_EVENTS = 50_000  # of a run: several times those of the longest


class Violation(Exception):
    """A promise that the run has broken."""


class Task(greenlet.greenlet):
    """A thread of a simulated process."""

    def __init__(self, process: "Process", body: Callable[[], Any]) -> None:
        super().__init__(parent=process.world.hub)
        self.process, self._body = process, body
        self.ended: collections.deque[Wait] = collections.deque()
        """Those who wait for its end."""

    def run(self, *_: Any) -> None:
        """Does its work; an error that nobody caught breaks a promise."""
        world = self.process.world
        try:
            self._body()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:  # whatever it is, it is a finding
            world.fail(f"{self.process.host} raised {error!r}", error)
        self.process.tasks.pop(self, None)
        world.wake_all(self.ended)


class Wait:
    """A task that waits for something."""

    __slots__ = ("is_over", "result", "task")

    def __init__(self, task: Task) -> None:
        self.task, self.is_over, self.result = task, False, False


class Process:
    """A simulated process: tasks, descriptors, and an end."""

    def __init__(self, world: "World", machine: Any) -> None:
        """Makes a process of a machine, which has a `host`."""
        self.world, self.machine, self.host = world, machine, machine.host
        self.tasks: dict[Task, None] = {}  # ordered, unlike a set
        self.descriptors: dict[int, Any] = {}
        self.is_dead = self.is_paused = False
        self._held: list[tuple[Task, Any]] = []
        self._number = itertools.count(3)

    def start(self, body: Callable[[], Any]) -> Task:
        task = Task(self, body)
        self.tasks[task] = None
        self.world.at(self.world.now, self.resume, task)
        return task

    def resume(self, task: Task, value: Any = None) -> None:
        """Lets a task go on, unless the process is paused."""
        if self.is_paused:
            self._held.append((task, value))
        elif not task.dead and not self.is_dead:
            self.world.running = task
            task.switch(value)

    def pause(self) -> None:
        """Stops all tasks where they are (SIGSTOP)."""
        self.is_paused = True

    def go_on(self) -> None:
        """Lets a paused process go on."""
        self.is_paused, held, self._held = False, self._held, []
        for task, value in held:
            self.world.at(self.world.now, self.resume, task, value)

    def describe(self, thing: Any) -> int:
        """Gives something a descriptor."""
        number = next(self._number)
        self.descriptors[number] = thing
        return number

    def end(self, is_gone: bool = False) -> None:
        """Ends it, as SIGKILL does; not for its own tasks. is_gone: its host is gone
        with it, so that no peer gets a word."""
        self.is_dead = True  # what `finally` clauses request from now on raises
        for task in list(self.tasks):
            self.world.running = task
            task.throw(greenlet.GreenletExit)
        self.tasks.clear()
        for thing in list(self.descriptors.values()):
            thing.drop(is_gone)
        self.descriptors.clear()


class World:
    """Everything that happens, in order."""

    def __init__(self, seed: int, preemption: float = 0.0) -> None:
        """Begins at 0; preemption: how likely a task gives way where it need not."""
        self.now, self.random = 0.0, random.Random(seed)
        self.hub = greenlet.getcurrent()
        self.running: Task  # the one that runs, or ran last
        self.events = 0
        self.is_over = False
        self.log: list[str] = []
        self.violation: Violation | None = None
        self._preemption = preemption
        self._heap: list[tuple[float, int, Callable[..., Any], tuple]] = []
        self._sequence = itertools.count()

    def at(self, when: float, function: Callable[..., Any], *args: Any) -> None:
        entry = (max(when, self.now), next(self._sequence), function, args)
        heapq.heappush(self._heap, entry)

    def run(self, deadline: float) -> None:
        """Runs until `is_over`; raises the first Violation, or one if nothing is left
        to happen, or not in time."""
        since = self.events
        while not self.is_over:
            if not self._heap:
                raise Violation("everybody waits for ever")
            when, _, function, args = heapq.heappop(self._heap)
            if when > deadline or self.events > MOST_EVENTS:
                deadline = min(deadline, when)
                raise Violation(f"it has not come to an end after {deadline:.0f} s")
            if when > self.now:
                self.now, since = when, self.events
            self.events += 1
            if self.events - since > MOST_AT_ONCE:
                raise Violation(f"somebody spins at {self.now:.3f} s")
            function(*args)
            if self.violation is not None:
                raise self.violation

    def fail(self, what: str, error: BaseException | None = None) -> None:
        """Records that a promise is broken."""
        if error is not None and not isinstance(error, Violation):
            what += "\n" + "".join(traceback.format_exception(error))
        self.violation = self.violation or Violation(f"at {self.now:.3f} s: {what}")

    def note(self, text: str) -> None:
        self.log.append(f"{self.now:8.3f}  {text}")

    # For tasks.

    def process(self) -> Process:
        """Returns the process whose task runs; ends the task if it is dead."""
        process = self.running.process
        if process.is_dead:
            raise greenlet.GreenletExit
        return process

    def sleep(
        self, places: Sequence[collections.deque[Wait]], timeout: float | None
    ) -> bool:
        """Lets the running task wait for places or a timeout in seconds (None: no
        limit); returns True if it was woken, False after the timeout."""
        process = self.process()
        wait = Wait(self.running)
        for place in places:
            place.append(wait)
        if timeout is not None:
            self.at(self.now + timeout, self._expire, wait)
        self.hub.switch()
        if process.is_dead:
            raise greenlet.GreenletExit
        for place in places:
            if wait in place:
                place.remove(wait)
        return wait.result

    def wake(self, wait: Wait) -> bool:
        """Wakes a task; returns False if it waits no more."""
        if wait.is_over:
            return False
        wait.is_over = wait.result = True
        self.at(self.now, wait.task.process.resume, wait.task)
        return True

    def wake_all(self, place: collections.deque[Wait]) -> None:
        """Wakes whoever waits at a place."""
        while place:
            self.wake(place.popleft())

    def _expire(self, wait: Wait) -> None:
        if not wait.is_over:
            wait.is_over = True
            wait.task.process.resume(wait.task)

    def spend(self, seconds: float) -> None:
        """Takes time for computing; others run meanwhile if they have to."""
        if self._heap and self._heap[0][0] <= self.now + seconds:
            self.sleep((), seconds)
        else:
            self.now += seconds

    def give_way(self) -> None:
        """Lets others run, now and then: a thread may be interrupted anywhere."""
        if self._preemption and self.random.random() < self._preemption:
            self.sleep((), 0.0)
