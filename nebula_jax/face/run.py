"""One cluster's part in a run: its connections, steps, checkpoints and records.

    def train_front(run):
        ...
        with run.dial("back") as link:
            line = half.open(link, h)
            state, line = run.restore(state, line)     # the newest step that all have
            for step, batch in run.batches(batch_of):  # pace, signals, stuck peers
                ...
                run.done(step, (state, line), metrics)

`nebula.main` makes a Run of flags; a notebook, or another command line, by hand.
"""

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from nebula_jax import errors
from nebula_jax.face import checks, connections
from nebula_jax.face import values as values_lib
from nebula_jax.runtime import connect, local_steps
from nebula_jax.runtime import context as context_lib
from nebula_jax.security import names as names_lib
from nebula_jax.training import metrics as metrics_lib


class Run(connections.Connections):
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
      tracker: what takes the metrics beside the run's folder: `wandb`, `trackio`,
        `mlflow`, `module:name`, or objects with `write(step, values)` and `close()`.
      metrics_port: [HOST:]PORT where Prometheus reads them.
      agreed: what else has to be equal in all clusters, JSON values by name.
      connection: listen, peer, tls, wan, federation, job, and timeouts, as
        of `connect.Settings`. `peer` may name the clusters: `back=HOST:PORT`.
    """

    _last: tuple[int, Any] | None = None
    _start: int | None = None
    _shapes: Mapping[str, Any] = {}
    _batch_of: Callable[[int], Any] | None = None
    _saved_batch: str | None = None
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
        tracker: Sequence[str | metrics_lib.Tracker] = (),
        metrics_port: str = "",
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
        number = cluster.partition(":")[2]
        self.index = int(number) if number.isdecimal() else 0
        self.key, self.codec = jax.random.key(seed), codec
        addresses = connections.addresses(connection.pop("peer", ""))
        settings = context_lib.Settings(
            workdir=pathlib.Path(workdir),
            cluster=cluster,
            steps=steps,
            checkpoint_every=checkpoint_every,
            log_every=log_every,
            allow_nonfinite=allow_nonfinite,
            trace=trace,
            tracker=tracker,
            metrics_port=metrics_port,
            connection=connect.Settings(peer=addresses.get("", ""), **connection),
        )
        compared = {"clusters": ",".join(clusters), "codec": codec, "seed": seed}
        super().__init__(
            context_lib.Context(settings),
            clusters,
            {**compared, **counts, **(agreed or {})},
            addresses,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives signals back to whoever had them before."""
        self.context.close()

    def restore(self, *values: Any) -> Any:
        """Agrees with the other clusters where to go on, and returns the values there.

        All channels are open by now. Call it once, before `batches` or `steps`.

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
        checks.check_rounds(self.rounds, values)
        start, is_behind = self._agree_start()
        fresh = values_lib.fresh(values)
        self._shapes = values_lib.shapes(fresh.shapes)
        before = self.saved.position(start) or {"shapes": self._shapes}
        if differs := values_lib.difference(self._shapes, before["shapes"]):
            raise checks.Misuse(
                f"the run in {self.folder} has saved other values: {differs}; undo the"
                " change, or name another workdir"
            )
        found, _ = self.saved.restore(start, fresh, is_behind)
        if start:
            values = values_lib.restored(values, found)
            # The loop's rounds are these now: their `after` finds out that all stop.
            self.rounds = next(iter(checks.of_type(local_steps.Rounds, values)), None)
        self._start, self._saved_batch = start, before.get("batch")
        self.context.begin(start, self.lines)
        return values[0] if len(values) == 1 else values

    def batches(self, batch_of: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
        """Yields `steps`, each with its batch.

        A run that is resumed has to take the batches of one that never stopped. So the
        function is called twice for the first step, and after a resume once for the
        step that is saved: both times it has to give what it gave before.

        Args:
          batch_of: step -> its batch, a pytree of arrays; a function of the step alone.

        Raises:
          Misuse: if it gives another batch; and as `steps`.
        """
        for step in self.steps():
            batch = batch_of(step)
            if self._batch_of is None:
                start, saved = self._start or 0, self._saved_batch
                checks.check_batches(batch_of, step, batch, start, saved)
                self._batch_of = batch_of
            yield step, batch

    def steps(self) -> Iterator[int]:
        """Yields the steps that are left, each as soon as the other clusters allow it.

        For batches that depend on more than the step, such as on the position of an
        iterator, which is then one of the values that are saved.

        Ends at the last step, or earlier where all clusters stop together: by SIGTERM
        or Ctrl-C at any of them. Then the values of the last `done` are saved.

        Raises:
          Misuse: if `restore` was not called before, or `done` after a step.
        """
        if self._start is None:
            raise checks.Misuse(
                "call run.restore(...) before run.steps(): it agrees with the other"
                " clusters after which step to go on"
            )
        for step in self.context.each(self._pace()):
            yield step
            if self._last is None or self._last[0] != step:
                raise checks.Misuse(
                    f"run.done({step}, values, metrics) was not called: end each step"
                    " with it"
                )
        if self._last is not None:
            self.saved.at_end(self.context.step, self._packed(), self._position)
        about: dict[str, Any] = {
            "ledger": {each.peer.cluster: each.ledger for each in self.lines}
        }
        if self.rounds is not None:
            about["rounds"] = self.rounds.described
        self.context.finish(about)
        self._is_finished = True

    def done(
        self, step: int, values: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Ends a step: records metrics, shows progress, saves values if that is due.

        Args:
          step: from `batches` or `steps`.
          values: as `restore` took them: one, or a tuple of all.
          metrics: name -> [] float32; `loss` is shown, `tokens` are added up.

        Raises:
          progress.NonfiniteError: if the loss, or a State, is not finite, in more steps
            than are allowed; nothing after it is saved.
        """
        found = checks.numbers("metrics", metrics or {})
        is_first, self._last = self._last is None, (step, values)
        if is_first:
            packed = values_lib.shapes(self._packed())
            if differs := values_lib.difference(packed, self._shapes):
                raise checks.Misuse(
                    "run.done takes the values of run.restore, in its order, as one"
                    f" tuple: {differs}"
                )
        for rounds in checks.of_type(local_steps.Rounds, values):
            if rounds.is_lost(values):
                raise checks.Misuse(
                    f"run.done({step}, ...) has the parameters from before the round:"
                    " what rounds.after returns was thrown away; write"
                    " state = state.replace(params=rounds.after(step, state.params))"
                )
        # With a quorum, rounds may have gone on without this cluster: see Rounds.step.
        at = self.context.step
        if step != at and self.rounds is None:
            raise checks.Misuse(f"run.done({step}, ...) in step {at}")
        self.context.record.step(at, found | checks.finite(values, found))
        if self._lead is not None:
            self._lead.done(step)
        is_due = at % self.context.settings.checkpoint_every == 0
        if self.rounds is not None:
            is_due = self.rounds.is_saved_after(at)
        if is_due:
            self.saved.save(at, self._packed(), self._position())

    def _packed(self) -> dict[str, Any]:
        assert self._last is not None  # a step was done
        values = self._last[1]
        # As `restore` took them: a NamedTuple is one value.
        return values_lib.arrays(values if type(values) is tuple else (values,))

    def _position(self) -> dict[str, Any]:
        batch = self._batch_of and checks.digest(self._batch_of(self.context.step))
        return {"shapes": self._shapes, "batch": batch}

    def evaluated(self, step: int, figures: Mapping[str, Any]) -> None:
        """Records figures on held-out data, name -> number, measured after a step."""
        numbers = checks.numbers("figures", figures)
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
            raise checks.Misuse(
                f"the function of {self.cluster} returned before run.steps() had ended:"
                " nothing of its last steps is saved; loop over all of them"
            )
        return self.context.exit_status()
