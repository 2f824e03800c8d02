"""The checkpoints of one cluster in its run's folder.

In a cluster of many processes the root alone has the folder. It gathers the arrays of
all, one after the other, and brings them back to all: a checkpoint does not show how
many processes wrote it, and any number goes on from it.
"""

import dataclasses
import json
import operator
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import nebula_jax
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import activity
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import run_folder
from nebula_jax.training import checkpoint, checkpoint_files

STEPS = ("--steps", "steps")  # what may grow from one command to the next
INIT_FROM = "--init_from"  # has the step of another run that this one began with


def _nothing(*_: Any) -> None:
    """Returns no data position; or finds nothing against saving."""


class Checkpoints:
    """A cluster's checkpoints: those it has, and where it saves more."""

    def __init__(
        self,
        workdir: pathlib.Path,
        cluster: str,
        settings: Mapping[str, Any],
        every: int,
        window: int = 0,
        fingerprints: Mapping[str, str] | None = None,
        work: activity.Work | None = None,
        before_save: Callable[[Any], None] = _nothing,
        after_save: Callable[[int, str], None] | None = None,
        before_restore: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Reads the folder's checkpoints; damaged ones are reported and not used.

        They are `every` so many steps; clusters, which have equal `settings`, may be
        `window` steps apart. For `fingerprints` see `check_same_run`; `work` tells the
        peers of saving. `before_save` gets a state before it is saved, and raises an
        error if it must not be; `after_save`, in the root, the step and its manifest's
        digest once it is on the disk; `before_restore` the step before its state is
        read or made. Raises checkpoint.CheckpointError if the folder holds a run with
        other settings, or checkpoints of which none can be used.
        """
        self._workdir, self._cluster = workdir, cluster
        self._settings = dict(settings)
        self._fingerprints = dict(fingerprints or {})
        self._work = work or activity.Work()
        self._every, self._window = every, window
        self._keep = to_keep(window, every)
        self._start = 0
        self._before_save, self._after_save = before_save, after_save
        self._before_restore = before_restore
        self._saved: checkpoint_files.Folder | None = None
        if ranks.is_root():
            check_same_run(workdir, cluster, settings, fingerprints)
            self._saved = checkpoint_files.Folder(
                folder_of(workdir, cluster),
                lambda about: difference(about, cluster, settings, fingerprints or {}),
                process.message,
            )
        self._steps = self._of_root(lambda saved: saved.steps)

    @property
    def steps(self) -> list[int]:
        """The steps that are saved, ascending."""
        return self._saved.steps if self._saved else self._steps

    def _of_root(self, value: Callable[[checkpoint_files.Folder], Any]) -> Any:
        """Returns a JSON value that the root has, in every process."""
        data = json.dumps(value(self._saved)).encode() if self._saved else b""
        return json.loads(ranks.bytes_from_root(data))

    @property
    def newest(self) -> int:
        """The newest step that is saved; 0 if none is."""
        return max([0, *self.steps])

    def widen(self, window: int) -> None:
        """Keeps a common checkpoint of clusters that may be so many steps apart."""
        self._window = max(self._window, window)
        self._keep = to_keep(self._window, self._every)

    def add_fingerprints(self, fingerprints: Mapping[str, str]) -> None:
        """Adds what is known later, as of the peer; see `check_same_run`."""
        self._fingerprints |= fingerprints
        if self._saved:
            check_same_run(
                self._workdir, self._cluster, self._settings, self._fingerprints
            )

    def position(self, step: int) -> Any:
        """Returns the data position that was saved with `step`; None for step 0."""
        if step == 0:
            return None
        return self._of_root(
            lambda saved: checkpoint_files.about(saved.path, step)["position"]
        )

    def restore(
        self, step: int, fresh: mesh_lib.ShardedInit, is_behind: bool = False
    ) -> tuple[Any, Any]:
        """Returns the state after `step`, on its devices, and its data position.

        A step of `steps`, or 0 for the `fresh` state without a position. Later
        checkpoints are set aside: they come again. If the run `is_behind` and its later
        state is to come, a fresh state does not begin it anew. Raises
        checkpoint.CheckpointError if the step is not saved here, or is 0 though this
        cluster is so far that its checkpoints must not be given up.
        """
        if step == 0 and not is_behind:
            steps = {self._cluster: self.steps, "another cluster": ()}
            newest_of_all(steps, self._every, self._window)
        elif step not in (0, *self.steps):
            raise checkpoint.CheckpointError(
                f"the run is to go on after step {step};"
                f" {_in_words({self._cluster: self.steps})}"
            )
        self._before_restore(step)
        self._start = step
        if self._saved:
            self._saved.go_on_from(step)
        # As the root's: all processes save a step, or none.
        self._steps = [each for each in self._steps if each <= step]
        if step == 0:
            return fresh.init(), None
        if ranks.count() == 1:
            assert self._saved is not None
            like = checkpoint.abstract(fresh.shapes, fresh.sharding)
            restored, about = checkpoint.restore(self._saved.path, step, like)
            position = about["position"]
        else:
            restored, position = self._restore_everywhere(step, fresh)
        if self._saved:
            process.message(f"going on after step {step}{self._grown(step)}")
        return restored, position

    def _grown(self, step: int) -> str:
        """Returns what follows if a checkpoint's run was to have fewer steps; or ""."""
        before, now = self.steps_of_run(step), _steps_in(self._settings)
        if before == now:
            return ""
        return (
            f", to {now} in place of {before} (steps): a learning rate that depends on"
            f" their number is that of a run of {now} from here on, and one that had"
            " fallen to 0 rises again"
        )

    def steps_of_run(self, step: int) -> Any:
        """Returns the steps planned as `step` was saved; in other ranks those now."""
        if self._saved is None:
            return _steps_in(self._settings)
        return _steps_in(checkpoint_files.about(self._saved.path, step)["settings"])

    def _restore_everywhere(
        self, step: int, fresh: mesh_lib.ShardedInit
    ) -> tuple[Any, Any]:
        """Reads a checkpoint in the root, and brings it to the devices of all."""
        shapes, structure = jax.tree.flatten(fresh.shapes)
        arrays: list[Any] = [None] * len(shapes)
        if self._saved:
            like = checkpoint.on_host(fresh.shapes)
            restored, _ = checkpoint.restore(self._saved.path, step, like)
            arrays = jax.tree.leaves(restored)
        placed = [
            mesh_lib.place(ranks.from_root(array, shape), where)
            for array, shape, where in zip(
                arrays, shapes, jax.tree.leaves(fresh.sharding), strict=True
            )
        ]
        return jax.tree.unflatten(structure, placed), self.position(step)

    def after(
        self, step: int, state: Any, position: Callable[[], Any] = _nothing
    ) -> None:
        """Saves the state if a checkpoint is due; CheckpointError if it cannot be."""
        if step % self._every == 0:
            self.save(step, state, position())

    def at_end(
        self, step: int, state: Any, position: Callable[[], Any] = _nothing
    ) -> None:
        """Saves the state after the last step, unless it is saved; see `after`."""
        if self._start < step and step not in self.steps:
            self.save(step, state, position())

    def save(self, step: int, state: Any, position: Any = None) -> None:
        """Saves the state after `step` with the data position."""
        self._before_save(state)
        about = {
            "version": nebula_jax.__version__,
            "cluster": self._cluster,
            "position": position,
            "settings": self._settings,
            "fingerprints": self._fingerprints,
        }
        with self._work.busy(activity.Activity.SAVING):
            whole = state if ranks.count() == 1 else ranks.to_root(state)
            if self._saved:
                checkpoint.save(self._saved, step, whole, about, self._keep)
                if self._after_save is not None:
                    self._after_save(step, self._saved.digest(step))
            else:
                self._steps = [*self._steps, step]


def _steps_in(settings: Mapping[str, Any]) -> Any:
    return next((settings[name] for name in STEPS if name in settings), None)


def folder_of(workdir: pathlib.Path, cluster: str) -> pathlib.Path:
    """Returns the folder of a cluster's checkpoints."""
    return run_folder.of_cluster(workdir, cluster) / "checkpoints"


def check_same_run(
    workdir: pathlib.Path,
    cluster: str,
    settings: Mapping[str, Any],
    fingerprints: Mapping[str, str] | None = None,
) -> None:
    """Checks that a cluster's folder holds no other run.

    `fingerprints` are what else must be as it was, such as digests of the cluster's
    text and model, as far as they are there yet. Raises checkpoint.CheckpointError,
    with the first difference, if it does; or if it holds checkpoints, none with
    metadata.
    """
    about = checkpoint_files.newest_about(folder_of(workdir, cluster))
    found = about and difference(about, cluster, settings, fingerprints or {})
    if found:
        raise checkpoint.CheckpointError(
            f"{workdir} holds a run with {found}; name another workdir"
        )


def difference(
    about: Mapping[str, Any],
    cluster: str,
    settings: Mapping[str, Any],
    fingerprints: Mapping[str, str],
) -> str:
    """Returns the first difference of a checkpoint's run from this one; empty if none.

    More steps than it had are none. `fingerprints` are this run's, as far as they are
    known; others are not compared.
    """
    before, known = about.get("settings"), about.get("fingerprints")
    if not isinstance(before, dict) or not isinstance(known, dict):
        return "no settings"
    ours = nebula_jax.__version__
    version = about.get("version", "before 0.3.0")  # earlier ones did not record it
    if version != ours:
        return f"nebula_jax {version}, this one has {ours}"
    for steps in STEPS:  # of which it may have more now
        now, had = settings.get(steps), before.get(steps)
        if isinstance(now, int) and isinstance(had, int) and now > had:
            before = {**before, steps: now}
    here = {"cluster": cluster, **settings, **fingerprints}
    saved = {"cluster": about.get("cluster"), **before}
    saved |= {name: value for name, value in known.items() if name in fingerprints}
    for name in sorted(here.keys() | saved.keys()):
        if here.get(name) != saved.get(name):
            return f"{name}={saved.get(name)}, this one has {here.get(name)}"
    return ""


def newest_in_all(workdir: pathlib.Path, clusters: Sequence[str]) -> int:
    """Returns the newest step of which all clusters have an undamaged checkpoint.

    For a reader of a run's folder; nothing in it changes. Raises
    checkpoint.CheckpointError if there is none; says what each has.
    """
    saved = {
        name: checkpoint_files.verified_steps(folder_of(workdir, name), process.message)
        for name in clusters
    }
    common = set.intersection(*map(set, saved.values()))
    if not common:
        raise checkpoint.CheckpointError(
            f"{workdir}: no step is saved in all clusters ({_in_words(saved)})"
        )
    return max(common)


def begun_step(workdir: pathlib.Path, clusters: Sequence[str]) -> int | None:
    """Returns the step of INIT_FROM in the clusters' own newest checkpoints; or None.

    By it a run resumes, wherever the run that it began with has come to since.
    """
    for cluster in clusters:
        about = checkpoint_files.newest_about(folder_of(workdir, cluster))
        if text := about.get("settings", {}).get(INIT_FROM):
            return int(text.removeprefix("step "))
    return None


def begun_with(
    fresh: mesh_lib.ShardedInit,
    workdir: pathlib.Path,
    cluster: str,
    step: int,
    params_of: Callable[[Any], Any] = operator.itemgetter("params"),
) -> mesh_lib.ShardedInit:
    """Returns a TrainState at step 0 with the parameters of another run.

    They are read when the state is made; that is an error if the model of that run has
    another shape. `params_of` picks them from the checkpoint.
    """

    def init() -> Any:
        params = params_of(checkpoint.read(folder_of(workdir, cluster), step))
        ours = jax.tree.map(lambda leaf: leaf.shape, fresh.shapes.params)
        if ours != jax.tree.map(lambda leaf: leaf.shape, params):
            raise checkpoint.CheckpointError(
                f"init_from={workdir}: {cluster} trained a model of another shape there"
            )
        process.message(f"beginning with {cluster} of {workdir}, step {step}")
        placed = mesh_lib.put(params, fresh.sharding.params)
        return dataclasses.replace(fresh.init(), params=placed)

    return fresh._replace(init=init)


def newest_of_all(
    steps: Mapping[str, Sequence[int]], every: int, window: int = 0
) -> int:
    """Returns the newest step that every cluster can go on from; 0 for the beginning.

    `steps` has, by cluster, those it has saved. Raises checkpoint.CheckpointError if
    there is none, though some cluster is so far that its checkpoints must not be thrown
    away.
    """
    common = max(set.intersection(*({0, *saved} for saved in steps.values())))
    newest = max([0, *(step for saved in steps.values() for step in saved)])
    # A run that ended before its first common checkpoint loses no more than this.
    if common == 0 and newest > every + window + 1:
        raise checkpoint.CheckpointError(
            f"no step is saved in all clusters ({_in_words(steps)}); put the missing"
            " files back, or name another workdir to begin anew"
        )
    return common


def _in_words(steps: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(
        f"{cluster} has {', '.join(map(str, saved)) or 'none'}"
        for cluster, saved in sorted(steps.items())
    )


def to_keep(window: int, every: int) -> int:
    """Returns how many checkpoints leave a common one, even if one is damaged.

    When a generator saves step d + window + 1, the discriminator may not have saved d
    yet: its newest is then d - every.
    """
    return 3 + (window + 1) // every
