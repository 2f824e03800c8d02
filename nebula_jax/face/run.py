"""One cluster's part in a run: its connections, steps, checkpoints and records.

    def train_front(run):
        ...
        with run.dial("back") as link:
            line = half.open(link, h)
            state, line = run.restore(state, line)     # the newest step that all have
            for step in run.steps():                   # pace, signals, stuck peers
                ...
                run.done(step, (state, line), metrics)

`nebula.main` makes a Run of flags; a notebook, or another command line, by hand.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

import nebula_jax
from nebula_jax import errors
from nebula_jax.communication.wire import frames
from nebula_jax.face import state as state_lib
from nebula_jax.face import values as values_lib
from nebula_jax.parallel import pace
from nebula_jax.runtime import connect, local_steps
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.records import checkpoints, run_folder
from nebula_jax.security import names as names_lib

Link = all_clusters.AnyLink


class Misuse(errors.SettingsError):
    """A call of a Run that comes too early, or never; the text says what to change."""


class Run:
    """A cluster's part in a run.

        with nebula.Run("back", ("front", "back"), steps=100, workdir="runs/x",
                        listen="127.0.0.1:7070", tls="off") as run:
            train_back(run)

    cluster: its name; index: what stands behind the colon, as in `replica:2`, else 0.
    clusters: names of all.
    key: of jax.random, the same in all clusters.
    codec: name of the codec that the run's flags or arguments have; empty for none.
    context: what the loop needs of this process; see `runtime.context`.

    Args:
      cluster: name of this one.
      clusters: names of all, in one order everywhere: in a chain from the first
        part to the last.
      steps: optimization steps of the whole run.
      workdir: folder of the run. A run that is there already goes on.
      codec: of what crosses, for the loop to use.
      seed: of `key`.
      checkpoint_every, log_every: steps.
      allow_nonfinite: steps that may be skipped because of NaN or Inf.
      trace: True to record what the process does and when.
      agreed: what else has to be equal in all clusters, JSON values by name.
      connection: listen, peer, tls, wan, federation, job, and timeouts, as
        of `connect.Settings`. `peer` may name the clusters: `back=HOST:PORT`.
    """

    _saved: checkpoints.Checkpoints | None = None
    _peers: all_clusters.Peers | None = None
    _lead: pace.Lead | None = None
    rounds: local_steps.Rounds | None = None
    """Of `nebula.local_steps`, as they began."""
    _last: tuple[int, Any] | None = None
    _start: int | None = None
    _shapes: Mapping[str, Any] = {}
    _is_finished = False

    def __init__(
        self,
        cluster: str,
        clusters: Sequence[str],
        *,
        steps: int,
        workdir: pathlib.Path | str,
        codec: str = "",
        seed: int = 0,
        checkpoint_every: int = 100,
        log_every: int = 10,
        allow_nonfinite: int = 0,
        trace: bool = False,
        agreed: Mapping[str, Any] | None = None,
        **connection: Any,
    ) -> None:
        """Begins; errors.SettingsError if it cannot. Signals are caught from now on."""
        if cluster not in clusters:
            raise errors.SettingsError(
                f"cluster={cluster}: the clusters are {', '.join(clusters)}"
            )
        names_lib.check(clusters)
        counts = {"steps": steps, "checkpoint_every": checkpoint_every}
        for name, count in {**counts, "log_every": log_every}.items():
            if count < 1:
                raise errors.SettingsError(f"{name}={count}: must be at least 1")
        self.cluster, self.clusters, self.codec = cluster, tuple(clusters), codec
        number = cluster.partition(":")[2]
        self.index = int(number) if number.isdecimal() else 0
        self.key = jax.random.key(seed)
        self._addresses = _addresses(connection.pop("peer", ""))
        self._connection = connect.Settings(
            peer=self._addresses.get("", ""), **connection
        )
        self._every, self._steps = checkpoint_every, steps
        self.context = context_lib.Context(
            context_lib.Settings(
                workdir=pathlib.Path(workdir),
                cluster=cluster,
                steps=steps,
                checkpoint_every=checkpoint_every,
                log_every=log_every,
                allow_nonfinite=allow_nonfinite,
                trace=trace,
                connection=self._connection,
            )
        )
        self._agreed = {
            "clusters": ",".join(clusters),
            "codec": codec,
            "seed": seed,
            "steps": steps,
            "checkpoint_every": checkpoint_every,
            **(agreed or {}),
        }
        self._dialed: list[Any] = []  # links, or those of a cluster's other processes
        self._listened: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives signals back to whoever had them before."""
        self.context.close()

    # Connections.

    @contextlib.contextmanager
    def dial(self, peer: str) -> Iterator[Link]:
        """Connects to a cluster that listens.

        In a chain a middle part listens first, and dials then: what it tells the next
        part about its checkpoints depends on the parts before it.

        Args:
          peer: its name.

        Yields:
          The link, for `open` of a half and for channels of your own. Closes with the
          block.
        """
        self._check_names("dial", [peer])
        found = self._addresses.get(peer, self._addresses.get("", ""))
        settings = dataclasses.replace(self._connection, peer=found)
        if not settings.federation and not found:
            raise errors.SettingsError(
                f"cluster={self.cluster} needs peer=HOST:PORT of {peer}"
            )
        connect.check_means(settings, self.cluster, listens=False, dials=True)
        hello, work = self._hello(), self.context.work
        with connect.dial(settings, hello, peer=peer, work=work) as link:
            self._dialed.append(link)
            yield link

    @contextlib.contextmanager
    def listen(self, *clusters: str) -> Iterator[Any]:
        """Waits for clusters that dial this one.

        Args:
          clusters: their names.

        Yields:
          The link, or the links in the order of `clusters`. They close with the block.
        """
        self._check_names("listen", clusters)
        if self._dialed:
            raise Misuse(
                "call run.listen before run.dial: what this cluster tells the next one"
                " depends on those before it"
            )
        settings = self._connection
        connect.check_means(settings, self.cluster, listens=True, dials=False)
        with self.context.listen(self._hello(), clusters) as links:
            self._listened += links
            yield links[0] if len(clusters) == 1 else links

    @contextlib.contextmanager
    def meet(
        self, hub: str = "", may_return: bool = False
    ) -> Iterator[all_clusters.Peers]:
        """Connects to all other clusters, which do the same: for local steps.

        Args:
          hub: name of the cluster that all others have their only link to; empty if
            each has one to each.
          may_return: True if clusters may rejoin the hub: for rounds with a quorum.

        Yields:
          The peers, for `nebula.local_steps`.
        """
        dials = all_clusters.dialed(self.cluster, self.clusters, hub)
        named = [self._addresses[each] for each in dials if each in self._addresses]
        if named:
            settings = dataclasses.replace(self._connection, peer=",".join(named))
        else:
            settings = self._connection
        all_clusters.check_place(settings, self.cluster, self.clusters, hub)
        with all_clusters.connected(
            settings,
            self._hello(),
            self.clusters,
            hub=hub,
            work=self.context.work,
            may_return=may_return,
        ) as peers:
            self._peers = peers
            yield peers

    def _check_names(self, method: str, names: Sequence[str]) -> None:
        others = [each for each in self.clusters if each != self.cluster]
        for name in names:
            if name not in others:
                raise Misuse(
                    f"run.{method}({name!r}): the other clusters are"
                    f" {', '.join(others) or 'none'}"
                )

    def _hello(self) -> frames.Hello:
        """Returns the Hello of this cluster: with the steps it could resume after."""
        steps = set(self.saved.steps)
        for link in self._listened:  # the parts before this one of a chain
            steps &= set(link.peer.checkpoints)
        return frames.Hello(
            self.cluster, nebula_jax.__version__, self._agreed, tuple(sorted(steps))
        )

    @property
    def saved(self) -> checkpoints.Checkpoints:
        """The checkpoints of this cluster."""
        if self._saved is None:
            self._saved = self.context.open_checkpoints(self._agreed)
        return self._saved

    # The loop.

    def restore(self, *values: Any) -> Any:
        """Agrees with the other clusters where to go on, and returns the values there.

        All channels are open by now. Call it once, before `steps`.

        Args:
          values: as at step 0: pytrees of arrays, keys and numbers; the rounds of
            `nebula.local_steps` among them.

        Returns:
          The values as they were saved, or those given at the beginning of a run; one
          by itself, or a tuple.

        Raises:
          checkpoint.CheckpointError: if no step is saved in all clusters.
          values.ValueUnsaved: at a value that no checkpoint can have.
        """
        if self.rounds is not None and not _has_rounds(values):
            raise Misuse(
                "give run.restore and run.done the rounds of nebula.local_steps, too:"
                " state, rounds = run.restore(state, rounds)"
            )
        start, is_behind = self._agree_start()
        fresh = values_lib.fresh(values)
        self._shapes = values_lib.shapes(fresh.shapes)
        before = self.saved.position(start)
        differs = before and values_lib.difference(self._shapes, before["shapes"])
        if differs:
            raise Misuse(
                f"the run in {self.folder} has saved other values: {differs}; undo the"
                " change, or name another workdir"
            )
        found, _ = self.saved.restore(start, fresh, is_behind)
        if start:
            values = values_lib.restored(values, found)
        self._start = start
        links = [*self._dialed, *self._listened]
        if self._peers is not None:
            links += self._peers.lines
        self.context.begin(start, links)
        return values[0] if len(values) == 1 else values

    def _agree_start(self) -> tuple[int, bool]:
        """Returns the newest step that all clusters have, named by the last part.

        And True if the run is at a later one, as of rounds with a quorum.
        """
        context = self.context
        if self.rounds is not None:
            return self.rounds.agree_start(self.saved)
        if self._peers is not None:
            timeout = self._connection.connect_timeout
            start = all_clusters.agree_start(self._peers, self._every, 0, timeout)
            return start, False
        if not self._dialed:
            newest = self.saved.newest
            if self._listened:
                newest = context.welcome(self._listened, self.saved)
            return newest, False
        [start] = {context.wait_for_welcome(link) for link in self._dialed}
        for link in self._listened:
            link.welcome(start)
        return start, False

    def steps(self) -> Iterator[int]:
        """Yields the steps that are left, each as soon as the other clusters allow it.

        Ends at the last step, or earlier where all clusters stop together: by SIGTERM
        or Ctrl-C at any of them. Then the values of the last `done` are saved.

        Raises:
          Misuse: if `restore` was not called before, or `done` after a step.
        """
        if self._start is None:
            raise Misuse(
                "call run.restore(...) before run.steps(): it agrees with the other"
                " clusters after which step to go on"
            )
        for step in self.context.each(self._pace()):
            yield step
            if self._last is None or self._last[0] != step:
                raise Misuse(
                    f"run.done({step}, values, metrics) was not called: end each step"
                    " with it"
                )
        if self._last is not None:
            self.saved.at_end(self.context.step, self._packed(), self._position)
        links = [*self._dialed, *self._listened]
        if self._peers is not None:
            links += self._peers.links.values()
        about: dict[str, Any] = {
            "ledger": {each.peer.cluster: each.ledger for each in links}
        }
        if self.rounds is not None:
            about["rounds"] = self.rounds.described
        self.context.finish(about)
        self._is_finished = True

    def _pace(self) -> Iterator[int]:
        """Returns the steps: of a leader, a follower, one between, or one alone."""
        context = self.context
        if self.rounds is not None:
            return self.rounds.steps()
        if self._dialed and self._listened:
            stop = context.stop_requested
            leader = self._dialed[0]
            return pace.relay(leader, self._listened, context.step, self._steps, stop)
        if self._dialed:
            return context.follow(self._dialed[0])
        if self._listened:
            self._lead = context.lead(self._listened)
            return iter(self._lead)
        return context.alone()

    def done(
        self, step: int, values: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Ends a step: records metrics, shows progress, saves values if that is due.

        Args:
          step: from `steps`.
          values: as `restore` took them: one, or a tuple of all.
          metrics: name -> [] float32; `loss` is shown, `tokens` are added up.

        Raises:
          progress.NonfiniteError: if the loss, or a State, is not finite, in more steps
            than are allowed; nothing after it is saved.
        """
        found = _numbers("metrics", metrics or {})
        if self._last is None:
            packed = values_lib.arrays(_as_tuple(values))
            differs = values_lib.difference(values_lib.shapes(packed), self._shapes)
            if differs:
                raise Misuse(
                    "run.done takes the values of run.restore, in its order, as one"
                    f" tuple: {differs}"
                )
        if step != self.context.step and self.rounds is None:
            raise Misuse(f"run.done({step}, ...) in step {self.context.step}")
        checks = [
            each.is_finite
            for each in jax.tree.leaves(values, is_leaf=_is_state)
            if _is_state(each)
        ]
        if "loss" in found:
            checks.append(jnp.isfinite(found["loss"]))
        if checks:
            found["is_finite"] = jnp.all(jnp.stack(checks))
        self._last = step, values
        # With a quorum, rounds may have gone on without this cluster: see Rounds.step.
        at = step if self.rounds is None else self.rounds.step
        self.context.record.step(at, found)
        if self._lead is not None:
            self._lead.done(step)
        is_due = step % self._every == 0
        if self.rounds is not None:
            is_due = self.rounds.is_saved_after(at)
        if is_due:
            self.saved.save(at, self._packed(), self._position())

    def _packed(self) -> dict[str, Any]:
        assert self._last is not None  # a step was done
        return values_lib.arrays(_as_tuple(self._last[1]))

    def _position(self) -> dict[str, Any]:
        return {"shapes": self._shapes}

    def evaluated(self, step: int, figures: Mapping[str, Any]) -> None:
        """Records figures on held-out data.

        Args:
          step: after which they were measured.
          figures: name -> number.
        """
        numbers = _numbers("figures", figures)
        found = {name: float(value) for name, value in numbers.items()}
        self.context.record.evaluation(step, {"all": found})

    @property
    def folder(self) -> pathlib.Path:
        """The folder of this cluster, for files of your own."""
        return self.context.folder

    def exit_status(self) -> int:
        """Returns 0 after the last step; see `runtime.life.process` for others.

        Raises:
          Misuse: if the cluster's function has returned before `steps` had ended.
        """
        if not self._is_finished:
            raise Misuse(
                f"the function of {self.cluster} returned before run.steps() had ended:"
                " nothing of its last steps is saved; loop over all of them"
            )
        return self.context.exit_status()


def _has_rounds(values: Any) -> bool:
    """Returns True if rounds are among values."""

    def is_rounds(value: Any) -> bool:
        return isinstance(value, local_steps.Rounds)

    return any(map(is_rounds, jax.tree.leaves(values, is_leaf=is_rounds)))


def _as_tuple(values: Any) -> tuple[Any, ...]:
    """Returns values as `restore` took them: a NamedTuple is one value."""
    return values if type(values) is tuple else (values,)


def _numbers(what: str, found: Any) -> dict[str, Any]:
    """Returns name -> scalar.

    Raises:
      Misuse: if they are something else.
    """
    if not isinstance(found, Mapping):
        raise Misuse(f"{what} are a dict of numbers, not a {type(found).__name__}")
    for name, value in found.items():
        if np.shape(value) != () or isinstance(value, str):
            raise Misuse(
                f"{what}: {name} is no number but {type(value).__name__} of shape"
                f" {list(np.shape(value))}"
            )
    return dict(found)


def _is_state(value: Any) -> bool:
    return isinstance(value, state_lib.State)


def _addresses(peer: str) -> dict[str, str]:
    """Returns the addresses of `back=HOST:PORT,...` by name; one without by ""."""
    found: dict[str, str] = {}
    for each in filter(None, peer.split(",")):
        name, equals, address = each.rpartition("=")
        before = found.get(name)
        found[name] = f"{before},{address}" if before and not equals else address
    return found


def lock(run: Run) -> contextlib.AbstractContextManager[None]:
    """Holds the folder of a cluster for this process alone."""
    return run_folder.lock(run.folder)
