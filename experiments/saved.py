"""The checkpoints of one cluster in its run's folder."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import lifecycle, shared_flags
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import checkpoint


def check_same_run(
    cluster: str, agreed: dict[str, Any], own: Mapping[str, str] | None = None
) -> None:
    """Raises CheckpointError if the cluster's folder holds another run.

    Args:
      cluster: its name.
      agreed: the settings of all clusters.
      own: what else must be as it was, such as a digest of the cluster's text. Compared
        where the checkpoint has it too.
    """
    folder = shared_flags.cluster_folder(cluster) / "checkpoints"
    about = checkpoint.newest_about(folder)
    before, own = about.get("settings", agreed), {"cluster": cluster} | dict(own or {})
    known = {name: value for name, value in about.get("own", {}).items() if name in own}
    ours, theirs = agreed | {name: own[name] for name in known}, before | known
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise checkpoint.CheckpointError(
                f"{shared_flags.workdir()} holds a run with {name}={theirs.get(name)},"
                f" this one has {ours.get(name)}; name another --workdir"
            )


def newest_of_all(steps: Mapping[str, Sequence[int]], window: int = 0) -> int:
    """The newest step that every cluster can go on from; 0 for the beginning.

    Args:
      steps: cluster -> steps it has saved.
      window: steps that one cluster may be ahead of another.

    Raises:
      checkpoint.CheckpointError: if there is none, though some cluster is so far that
        its checkpoints must not be thrown away.
    """
    common = max(set.intersection(*({0, *saved} for saved in steps.values())))
    newest = max([0, *(step for saved in steps.values() for step in saved)])
    # A run that ended before its first common checkpoint loses no more than this.
    first_interval = shared_flags.CHECKPOINT_EVERY.value + window + 1
    if common == 0 and newest > first_interval:
        have = "; ".join(
            f"{cluster} has {', '.join(map(str, saved)) or 'none'}"
            for cluster, saved in sorted(steps.items())
        )
        raise checkpoint.CheckpointError(
            f"no step is saved in all clusters ({have}); put the missing files back, or"
            " name another --workdir to begin anew"
        )
    return common


def kept(window: int, every: int) -> int:
    """Checkpoints to keep so that a common one is left, even if one is damaged.

    When a generator saves step d + window + 1, the discriminator may not have saved d
    yet: its newest is then d - every.
    """
    return 3 + (window + 1) // every


class Saved:
    """What a cluster has saved so far, and where it saves more."""

    def __init__(
        self,
        cluster: str,
        agreed: dict[str, Any],
        window: int = 0,
        own: Mapping[str, str] | None = None,
    ):
        """Looks at the folder's checkpoints; damaged ones are told and left aside.

        Args:
          cluster: its name.
          agreed: the run's settings (see `m3_setup.settings`).
          window: steps that one cluster may be ahead of another.
          own: see `check_same_run`.

        Raises:
          checkpoint.CheckpointError: if the folder holds a run with other settings.
        """
        check_same_run(cluster, agreed, own)
        self._cluster, self._own = cluster, {"cluster": cluster} | dict(own or {})
        self._folder = shared_flags.cluster_folder(cluster) / "checkpoints"
        self._agreed = agreed
        self._keep = kept(window, shared_flags.CHECKPOINT_EVERY.value)
        self.steps = checkpoint.verified_steps(self._folder, lifecycle.say)

    def add_own(self, **more: str) -> None:
        """What was learned since, of the peer, that must be as it was; checks it."""
        self._own |= more
        check_same_run(self._cluster, self._agreed, self._own)

    def restore(self, step: int, state: mesh_lib.ShardedInit) -> tuple[Any, Any]:
        """The state after `step`, on its devices, and the data position saved with it.

        Step 0 is a fresh state. Later checkpoints are dropped: they come again.
        """
        checkpoint.discard_after(self._folder, step)
        self.steps = [saved for saved in self.steps if saved <= step]
        if step == 0:
            return state.init(), None
        like = checkpoint.abstract(state.shapes, state.sharding)
        restored, about = checkpoint.restore(self._folder, step, like)
        lifecycle.say(f"going on after step {step}")
        return restored, about["position"]

    def save(self, step: int, state: Any, position: Any = None) -> None:
        """Saves the state after `step` with the data position."""
        about = {"position": position, "settings": self._agreed, "own": self._own}
        checkpoint.save(self._folder, step, state, about, self._keep)
        self.steps = [*self.steps, step]

    def is_due(self, step: int) -> bool:
        """Whether every cluster saves after `step`."""
        return step % shared_flags.CHECKPOINT_EVERY.value == 0
