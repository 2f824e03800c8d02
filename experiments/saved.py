"""The checkpoints of one cluster in its run's folder."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from experiments import clusters
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import checkpoint


class Placed(NamedTuple):
    """A state that is not there yet: how to make it, its shapes, where it goes."""

    init: Callable[[], Any]
    shapes: Any
    sharding: Any


def placed(mesh: Mesh, init: Callable[[], Any]) -> Placed:
    """Plans where every array of `init()` goes on the mesh."""
    shapes = jax.eval_shape(init)
    sharding = mesh_lib.state_sharding(mesh, mesh_lib.ENCODER_RULES, shapes)
    return Placed(init, shapes, sharding)


class Saved:
    """What a cluster has saved so far, and where it saves more."""

    def __init__(self, cluster: str, agreed: dict[str, Any]):
        """Looks at the folder's checkpoints; damaged ones are told and left aside.

        Args:
          cluster: its name.
          agreed: the run's settings (see `m3_setup.settings`).

        Raises:
          checkpoint.CheckpointError: if the folder holds a run with other settings.
        """
        self._folder = clusters.cluster_folder(cluster) / "checkpoints"
        self._agreed = agreed
        # A generator may be `window` steps ahead of the newest step that all have.
        self._keep = 2 + -(-clusters.WINDOW.value // clusters.CHECKPOINT_EVERY.value)
        self.steps = checkpoint.verified_steps(self._folder, clusters.say)
        if self.steps:
            before = checkpoint.about(self._folder, self.steps[-1])["settings"]
            for name in sorted(agreed.keys() | before.keys()):
                if agreed.get(name) != before.get(name):
                    raise checkpoint.CheckpointError(
                        f"{clusters.workdir()} holds a run with"
                        f" {name}={before.get(name)}, this one has {agreed.get(name)};"
                        " name another --workdir, or remove it"
                    )

    def restore(self, step: int, state: Placed) -> tuple[Any, Any]:
        """The state after `step`, on its devices, and the data position saved with it.

        Step 0 is a fresh state. Later checkpoints are dropped: they come again.
        """
        checkpoint.discard_after(self._folder, step)
        if step == 0:
            return jax.jit(state.init, out_shardings=state.sharding)(), None
        like = checkpoint.abstract(state.shapes, state.sharding)
        restored, about = checkpoint.restore(self._folder, step, like)
        clusters.say(f"going on after step {step}")
        return restored, about["position"]

    def save(self, step: int, state: Any, position: Any = None) -> None:
        """Saves the state after `step` with the data position."""
        about = {"position": position, "settings": self._agreed}
        checkpoint.save(self._folder, step, state, about, self._keep)
        self.steps = [*self.steps, step]

    def is_due(self, step: int) -> bool:
        """Whether every cluster saves after `step`."""
        return step % clusters.CHECKPOINT_EVERY.value == 0
