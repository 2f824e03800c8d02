"""Progress of a cluster: means between log lines, totals for its summary."""

import math
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import ranks
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity
from nebula_jax.communication.worker_link import AnyLink
from nebula_jax.runtime.life import phases as phases_lib
from nebula_jax.runtime.life import process, restarts, screen
from nebula_jax.runtime.records import report, run_folder, traces
from nebula_jax.training import finite, metrics, partition

FIRST_STEP = "until step 1"  # the part of a traced run's time in which it compiles
SKIPPED = "skipped_steps"  # steps, since the run began, that were not finite


class Traffic(NamedTuple):
    """The traffic of a cluster's links since the process started."""

    sent: int = 0  # bytes
    received: int = 0  # bytes
    waited: float = 0.0  # seconds


def traffic(links: Sequence[AnyLink]) -> Traffic:
    """Returns the traffic of several links together."""
    return Traffic(
        sum(link.bytes_moved("sent") for link in links),
        sum(link.bytes_moved("received") for link in links),
        sum(link.waited for link in links),
    )


def waited(links: Sequence[AnyLink]) -> dict[str, float]:
    """Returns the seconds so far in which each peer was waited for."""
    found: dict[str, float] = {}
    for link in links:  # of a peer that has rejoined there are several
        name = link.peer.cluster
        found[name] = found.get(name, 0.0) + link.waited
    return found


class NonfiniteError(errors.NebulaError):
    """A loss or a gradient that is not finite, once more than --allow_nonfinite."""


class Skips:
    """The steps of one cluster whose loss or gradient was not finite: skipped, counted.

    A training step finds out by itself, in its program, and then leaves its state as it
    was (`TrainState.apply_gradients`); here a cluster decides if the run goes on. So
    count steps with which parameters overflowed, but those are spoilt: see `check`.
    """

    def __init__(
        self,
        cluster: str,
        allowed: int,
        count: int = 0,
        record: Callable[[int, int], None] = lambda step, count: None,
    ) -> None:
        """Counts skips from `count` on, of `allowed`; gives `record` step and count."""
        self._cluster, self._allowed, self._record = cluster, allowed, record
        self.count = count  # steps that were skipped so far
        self._is_last_skipped = False

    def take(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Waits for a step; raises NonfiniteError if more are skipped than allowed."""
        self._is_last_skipped = not metrics.get("is_finite", True)
        if not self._is_last_skipped:
            return
        loss = float(metrics.get("loss", 0.0))
        what = f"{self._cluster}: the loss of step {step} is {loss}"
        if "loss" not in metrics:
            what = f"{self._cluster}: a gradient of step {step}, or a parameter after"
            what += " it, is not finite"
        elif math.isfinite(loss):
            what = f"{self._cluster}: step {step} has the loss {loss:.4g}, but its"
            what += " gradient or the parameters after it are not finite"
        if self.count >= self._allowed:
            raise NonfiniteError(
                f"{what}; nothing after it is saved (allow_nonfinite={self._allowed}"
                " is the number of such steps that are skipped)"
            )
        self.count += 1
        self._record(step, self.count)
        process.message(f"{what}: skipped, {self.count} of {self._allowed}")

    def check(self, state: Any) -> None:
        """Checks that the last step has left finite parameters, if it was not finite.

        They are what is below a `params` in the state, in a tree or in names such as
        `0000 0.params.w` (`face.values.arrays`). Raises NonfiniteError if a step with a
        finite gradient has spoilt them.
        """
        if not self._is_last_skipped:
            return
        params = [
            leaf
            for path, leaf in partition.named(state)
            if "params" in re.split("[/.]", path)
        ]
        if not finite.all_finite(params, squares=True):
            raise NonfiniteError(
                f"{self._cluster}: a step has made parameters that are not finite, so"
                " they are not saved; is the learning rate too high?"
            )


class Progress:
    """The record of one cluster's steps, in its folder and on standard output."""

    def __init__(
        self,
        workdir: pathlib.Path,
        cluster: str,
        start: int,
        steps: int,
        log_every: int,
        links: Sequence[AnyLink] = (),
        work: activity.Work | None = None,
        allow_nonfinite: int = 0,
        phases: phases_lib.Phases | None = None,
        delay: float = 0.0,
        trackers: Callable[[], metrics.Tracker] | None = None,
    ) -> None:
        """Begins after step `start`, from now on.

        Means are reported every `log_every` steps, with the traffic of `links`;
        `allow_nonfinite` steps of the run may be skipped (`Skips`); `phases` end with
        the first step of this process. `delay` is in seconds, of an emulated line both
        ways, which no kernel measures; `trackers` opens what takes the metrics beside
        the cluster's files.
        """
        self._cluster, self._folder = cluster, run_folder.of_cluster(workdir, cluster)
        self._start, self._steps, self._log_every = start, steps, log_every
        self._log: metrics.MetricsLog | None = None
        if ranks.is_root():  # the metrics are the same in all processes of a cluster
            self._log = metrics.MetricsLog(self._folder, start, process.message)
        self._links, self._phases, self._delay = links, phases, delay
        self._lines = screen.own_lines()
        # The root's count: it has set aside what came after the checkpoint.
        before = metrics.read(self._folder) if ranks.is_root() else ()
        skipped = max((each.get(SKIPPED, 0) for each in before), default=0)
        self._skips = Skips(
            cluster,
            allowed=allow_nonfinite,
            count=ranks.agree(skipped),
            record=lambda step, count: self._write(step, {SKIPPED: count}),
        )
        self._pending: list[Mapping[str, jax.Array]] = []
        self._unsettled: list[tuple[int, Mapping[str, jax.Array]]] = []
        self._trackers = trackers() if trackers and self._log else None
        self._begin = self._since = time.monotonic()
        self._before = self._at_begin = traffic(links)
        self._waited = waited(links)
        self._tokens = 0
        self._work = work or activity.Work()
        self._work.begin()
        self._has_stepped, self._stepped = False, 0.0
        self._trace = self._work.trace
        self._trace.begin()

    def step(self, step: int, values: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step; every `log_every`, reports their means.

        Name -> [] float32, perhaps with `loss`; `tokens`, if there are any, are added
        up. Of a step that was skipped, `is_finite` is False, and nothing else is
        averaged. The step before is settled, not this one: the device may still be at
        it. Raises NonfiniteError: see `settle`.
        """
        self._work.step_done()
        if not self._has_stepped:
            self._trace.lump(FIRST_STEP)
        with self._trace.span("record"):
            self._record(step, values)

    def _record(self, step: int, values: Mapping[str, jax.Array]) -> None:
        if not self._has_stepped:
            self._has_stepped, self._stepped = True, time.monotonic()
            if self._phases:
                self._phases.enter("training")
            if self._log:
                restarts.record_first_step(self._folder, step, time.time())
        self.settle()
        self._unsettled.append((step, values))
        self._pending.append(values)
        if step % self._log_every == 0 or step == self._steps:
            self._report(step)

    def settle(self) -> None:
        """Waits for all steps so far; raises NonfiniteError if too many are skipped."""
        while self._unsettled:
            self._skips.take(*self._unsettled.pop(0))

    def check(self, state: Any) -> None:
        """Settles, and checks that the state may be saved; raises NonfiniteError."""
        self.settle()
        self._skips.check(state)

    def _report(self, step: int) -> None:
        self.settle()
        pending = jax.device_get(self._pending)
        self._pending = []
        tokens = int(sum(each.get("tokens", 0) for each in pending))
        self._tokens += tokens
        now, moved = time.monotonic(), traffic(self._links)
        seconds = now - self._since
        taken = [each for each in pending if each.get("is_finite", True)]
        record = {
            name: float(np.mean([each[name] for each in taken])) if taken else math.nan
            for name in (taken or pending)[0]
            if name not in ("tokens", "is_finite")
        } | {
            **({"tokens_per_second": tokens / seconds} if tokens else {}),
            "steps_per_second": len(pending) / seconds,
            **self._crossed(moved, seconds),
        }
        if self._steps:
            # The first step of this process, in which it compiles, is not like others.
            since, count = self._since, len(pending)
            if since < self._stepped and count > 1:
                since, count = self._stepped, count - 1
            left = (self._steps - step) * (now - since) / count
            record |= {"steps_left": self._steps - step, "seconds_left": left}
        self._since, self._before = now, moved
        self._write(step, record)
        if self._log:
            record = {"step": step} | record
            line = metrics.progress_line(self._cluster, self._steps, record)
            about = {"cluster": self._cluster} | record
            self._lines.add(self._cluster, process.formatted(line, about))

    def _crossed(self, moved: Traffic, seconds: float) -> dict[str, Any]:
        """Returns what crossed in the last `seconds`, and who was waited for."""
        before, found = self._before, waited(self._links)
        record: dict[str, Any] = {
            "bytes_sent": moved.sent,
            "bytes_received": moved.received,
            "sent_mbit": (moved.sent - before.sent) * 8e-6 / seconds,
            "received_mbit": (moved.received - before.received) * 8e-6 / seconds,
            "waiting_share": (moved.waited - before.waited) / seconds,
        }
        shares = {
            name: (now - self._waited.get(name, 0.0)) / seconds
            for name, now in found.items()
        }
        trips = {
            each.peer.cluster: each.round_trip + self._delay
            for each in self._links
            if each.round_trip
        }
        self._waited = found
        by_peer = {"waiting_for": shares, "round_trip": trips}
        return record | {name: each for name, each in by_peer.items() if each}

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        if self._log:
            self._log.write(step, values)
        if self._trackers:
            self._trackers.write(step, values)

    def evaluation(self, step: int, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Records figures on held-out text: language or split -> name -> number."""
        by_name: dict[str, dict[str, float]] = {}
        for key, each in figures.items():
            for name, number in each.items():
                by_name.setdefault(f"held_out_{name}", {})[key] = number
        self._write(step, by_name)

    def probe(
        self, step: int, figures: Mapping[str, float | Mapping[str, float]]
    ) -> None:
        """Records probes, numbers or by language, as `probe_<name>`, if there are."""
        if figures:
            self._write(step, {f"probe_{name}": each for name, each in figures.items()})

    def finish(self, last: int, more: Mapping[str, Any]) -> None:
        """Closes the files; writes summary.json unless nothing was left to do.

        `more` has JSON values that belong into it. Raises NonfiniteError: see `settle`.
        """
        self.settle()
        if self._pending:
            self._report(last)
        seconds = time.monotonic() - self._begin  # without the flushes of what follows
        if self._trace.is_on:
            more = {**more, "time": traces.time(self._trace, self._links)}
            if last != self._start:  # else that of the steps is there already
                traces.write(self._trace, self._folder, self._cluster)
        self._lines.flush()
        for each in filter(None, (self._log, self._trackers)):
            each.close()
        if last == self._start or not self._log:
            return
        moved = traffic(self._links)
        owners: dict[str, str] = {}
        for link in self._links:  # whose each peer was, by its certificate
            if isinstance(link, Link) and link.owner:
                owners[link.peer.cluster] = link.owner
        summary = {
            "cluster": self._cluster,
            "first_step": self._start + 1,
            "last_step": last,
            "seconds": seconds,
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / seconds,
            "bytes_sent": moved.sent,
            "bytes_received": moved.received,
            "waited_seconds": moved.waited - self._at_begin.waited,
            SKIPPED: self._skips.count,
            "until_first_step": self._phases.seconds if self._phases else {},
            **({"certificates_of_peers": owners} if owners else {}),
            **more,
        }
        report.write(self._folder / "summary.json", summary)
