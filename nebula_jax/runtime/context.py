"""The context of a training loop: what every process of a run needs, wired once.

    context = Context(Settings(workdir=folder, cluster="front", steps=1000, ...))
    saved = context.open_checkpoints(compared)
    clusters = ["back", "front"]
    with context.connected(hello(saved.steps), clusters, hub="back") as peers:
        link = peers.links["back"]
        start = context.agree_start(peers)
        state, position = saved.restore(start, fresh)
        batches = text.begin(position)
        context.begin(start, [link])
        for step in context.each(context.follow(link)):
            ...                                 # next batch, step, send, receive
            context.record.step(step, metrics)
            saved.after(step, state, text.position)   # called if a checkpoint is due
        saved.at_end(context.step, state, text.position)
        context.finish(described)
    return context.exit_status()

The context knows signals, time, checkpoints and records; it knows no model and no flag.
What crosses between clusters stays in the loop.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from nebula_jax import trace as trace_lib
from nebula_jax.communication import ranks, wan
from nebula_jax.communication.wire import activity, frames
from nebula_jax.communication.worker_link import AnyLink
from nebula_jax.parallel import pace
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import phases, process
from nebula_jax.runtime.ranks import cluster
from nebula_jax.runtime.records import checkpoints, progress, run_folder, trackers
from nebula_jax.training import metrics

Links = Sequence[AnyLink]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one process of a run, whatever it trains."""

    workdir: pathlib.Path  # the run's folder
    cluster: str  # name of this process's cluster
    steps: int  # optimization steps of the whole run
    checkpoint_every: int  # steps between checkpoints
    window: int = 0  # steps that one cluster may be ahead of another
    log_every: int = 1  # steps between progress lines
    allow_nonfinite: int = 0  # steps that may be skipped: loss or gradient not finite
    trace: bool = False  # True to record what the process does and when
    tracker: Sequence[str | metrics.Tracker] = ()
    """What takes the metrics beside the cluster's files; see `trackers.opened`."""
    metrics_port: str = ""  # [HOST:]PORT for Prometheus; empty for none
    emulated_seconds: float = 0.0  # of each `emulate_compute`, as on a slower device
    connection: connect.Settings = dataclasses.field(default_factory=connect.Settings)
    """How this cluster reaches the others."""


class Context:
    """The interrupt, trace, checkpoints and records of one process of a run."""

    record: progress.Progress  # steps and their figures, once the loop has begun

    def __init__(self, settings: Settings) -> None:
        """Catches signals; raises errors.SettingsError at bad descriptors, trackers."""
        self.settings = settings  # the settings of this process
        trackers.check(settings.tracker, settings.metrics_port)
        self._interrupt = process.Interrupt().install()
        name, rank = settings.cluster, ranks.rank()
        self.phases = phases.Phases(f"{name}/{rank}" if rank else name)
        self.trace = trace_lib.Trace(settings.trace)
        self.work = activity.Work(settings.connection.stuck_timeout, trace=self.trace)
        self.work.on_lost = functools.partial(self._interrupt.end_wait, self._name)
        # The other processes of this cluster see how far this one is.
        cluster.watch(self.work, self._interrupt)
        self.folder = run_folder.of_cluster(settings.workdir, settings.cluster)
        self.step = 0  # the last step that was begun
        self._ends: list[Callable[[], object | None]] = []
        self._check: Callable[[Any], None] | None = None

    def open_checkpoints(
        self,
        compared: Mapping[str, Any],
        fingerprints: Mapping[str, str] | None = None,
        part: str = "",
    ) -> checkpoints.Checkpoints:
        """Opens the checkpoints of this cluster, or of one `part` of an uncut run.

        A part has the name of the cluster that would train it. `compared` settings are
        equal in all clusters, and in the saved run; `fingerprints` are digests of this
        cluster's text and models. Raises checkpoint.CheckpointError if the folder holds
        another run, or nothing that can be used.
        """
        settings, name = self.settings, part or self.settings.cluster
        return checkpoints.Checkpoints(
            settings.workdir,
            name,
            compared,
            settings.checkpoint_every,
            settings.window,
            fingerprints=fingerprints,
            work=self.work,
            before_save=self._check_state,
            after_save=connect.recorder(settings.connection, name).saved,
            before_restore=lambda step: self.phases.enter(
                "restoring" if step else "initializing"
            ),
        )

    def _check_state(self, state: Any) -> None:
        """Waits for the steps under way: a state that is not finite is not saved."""
        if self._check is not None:
            self._check(state)

    def connected(
        self,
        hello: frames.Hello,
        clusters: Sequence[str],
        *,
        settings: connect.Settings | None = None,
        hub: str = "",
        **more: Any,
    ) -> contextlib.AbstractContextManager[all_clusters.Peers]:
        """Connects as `all_clusters.connected`, by `settings` or this process's own."""
        own = self.settings.cluster
        others = [hub] if hub not in ("", own) else clusters
        names = [each for each in others if each != own]
        self.phases.enter(f"waiting for {', '.join(names)}")
        return all_clusters.connected(
            settings or self.settings.connection,
            hello,
            clusters,
            hub=hub,
            work=self.work,
            **more,
        )

    def agree_start(self, peers: all_clusters.Peers) -> int:
        """Returns the step to resume after; see `all_clusters.agree_start`."""
        settings = self.settings
        return all_clusters.agree_start(
            peers,
            settings.checkpoint_every,
            settings.window,
            settings.connection.connect_timeout,
        )

    def begin(self, start: int, links: Links = ()) -> None:
        """Begins records and clock after step `start`; links' traffic is recorded."""
        self.phases.enter("compiling")
        settings, self.step = self.settings, start
        self.record = progress.Progress(
            settings.workdir,
            settings.cluster,
            start,
            settings.steps,
            settings.log_every,
            links,
            self.work,
            allow_nonfinite=settings.allow_nonfinite,
            phases=self.phases,
            delay=sum(each.delay for each in wan.from_string(settings.connection.wan)),
            trackers=self._trackers,
        )
        self._check = self.record.check

    def _trackers(self) -> trackers.Trackers:
        settings = self.settings
        about = trackers.About(settings.workdir, settings.cluster, self.folder)
        return trackers.opened(settings.tracker, settings.metrics_port, about)

    def stop_when(self, end: Callable[[], object | None]) -> None:
        """Ends the run early once `end` returns a reason, such as text that ran out."""
        self._ends.append(end)

    def stop_requested(self) -> bool:
        """Returns True once the run should end: by a signal, or for another reason."""
        return self._interrupt.requested() or any(
            end() is not None for end in self._ends
        )

    def follow(self, link: AnyLink, followers: Links = ()) -> Iterator[int]:
        """Yields the steps of a cluster that dialed: see `pace.follow`."""
        settings, stop = self.settings, self.stop_requested
        last, window = settings.steps, settings.window
        yield from pace.follow(link, self.step, last, window, stop, followers)
        if link.stop_step is not None and not stop():
            # It has printed which cluster asked; for a chain, from one to the next.
            process.message(
                f"{link.peer.cluster} named the last step; it says who asked to stop"
            )

    def lead(self, links: Links) -> pace.Lead:
        """Returns the steps of the cluster that listens: see `pace.Lead`."""
        settings, stop = self.settings, self.stop_requested
        return pace.Lead(
            links, self.step, settings.steps, settings.window, stop, process.message
        )

    def alone(self) -> Iterator[int]:
        """Returns the steps of a process that trains all parts: see `pace.alone`."""
        return pace.alone(self.step, self.settings.steps, self.stop_requested)

    def each(self, steps: Iterable[int]) -> Iterator[int]:
        """Yields the steps of `pace`, the same in all processes of the cluster."""
        # From here on there is something to save: a first signal ends the run softly.
        self._interrupt.is_graceful = True
        for step in self.trace.each("wait", ranks.in_step(iter(steps))):
            self.step = step
            yield step

    def finish(self, described: Mapping[str, Any]) -> None:
        """Closes the records after the last step; says so if it is the run's last."""
        self.record.finish(self.step, described)
        if self.step >= self.settings.steps:
            process.message(
                f"{self._name}: done after step {self.step}; its files are in"
                f" {self.folder}"
            )

    @property
    def _name(self) -> str:
        name, rank = self.settings.cluster, ranks.rank()
        return f"{name} (process {rank})" if rank else name

    def close(self) -> None:
        """Gives signals back to whoever had them before."""
        self._interrupt.uninstall()

    def compute(
        self, step: int, function: Callable[..., Any], *arguments: Any, **about: Any
    ) -> Any:
        """Returns function(*arguments), timed by a traced run with `about` (JSON)."""
        with self.trace.span("compute", step=step, **about):
            return self.trace.ready(function(*arguments))

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Reports to the peers, who wait meanwhile, that this process evaluates."""
        return self.work.busy(activity.Activity.EVALUATING)

    def emulate_compute(self, computed: Any = None) -> None:
        """Sleeps as long as a step is to take longer, once `computed` is finished."""
        if self.settings.emulated_seconds:
            jax.block_until_ready(computed)
            time.sleep(self.settings.emulated_seconds)

    def exit_status(self) -> int:
        """Returns the exit status of the process; says why the run ended, if early."""
        for reason in filter(None, (end() for end in self._ends)):
            process.message(str(reason))
        steps = self.settings.steps
        return self._interrupt.exit_status(self._name, self.step, steps, self.folder)
