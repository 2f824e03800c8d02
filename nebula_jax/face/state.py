"""A model in training under any optax optimizer, as one value.

state = nebula.state(params, optax.adamw(1e-3))
state = state.apply(grads)          # under jit or not
state.params, state.step
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.training import partition
from nebula_jax.training import state as train_state


@struct.dataclass
class State:
    """A state of training: a pytree that `Run.restore` and `Run.done` save.

    params: all parameters, any pytree.
    opt_state: optax's, of the parameters that train.
    step: [] int32, steps taken.
    is_finite: [] bool, False if the last step was left out because a gradient was not
      finite, or has made parameters that are not; `Run.done` then ends the run, or
      counts it (allow_nonfinite).
    """

    params: Any
    opt_state: Any  # optax.OptState, which names a type that pdoc does not find
    step: jax.Array
    is_finite: jax.Array
    optimizer: optax.GradientTransformation = struct.field(pytree_node=False)
    is_trained: partition.IsTrained = struct.field(pytree_node=False)

    def apply(self, grads: Any) -> "State":
        """Takes one optimization step, in place: use the state that it returns alone.

        If the gradient is not finite, parameters and optimizer stay as they were.

        Args:
          grads: like the parameters that train; as a half of `nebula.cut` returns them.
            Of a whole tree, as `jax.grad` returns it, the others are not used.

        Raises:
          errors.SettingsError: at a gradient of other parameters.
        """
        trained, frozen = partition.split(self.params, self.is_trained)
        if jax.tree.structure(grads) != jax.tree.structure(trained):  # type: ignore[operator]
            grads = partition.split(grads, self.is_trained)[0]  # of the whole tree
        (after, opt_state), is_finite = _taken(
            self.optimizer, trained, self.opt_state, grads
        )
        return dataclasses.replace(
            self,
            params=partition.merge(after, frozen),
            opt_state=opt_state,
            step=self.step + 1,
            is_finite=is_finite,
        )

    @property
    def trained(self) -> Any:
        """The parameters that train, like `grads`."""
        return partition.split(self.params, self.is_trained)[0]


def state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    is_trained: partition.IsTrained = partition.train_all,
) -> State:
    """Makes a state at step 0.

    >>> state = nebula.state({"w": jnp.ones(2)}, optax.sgd(0.5))
    >>> state.apply({"w": jnp.ones(2)}).params["w"].tolist()
    [0.5, 0.5]

    Args:
      params: any pytree of arrays: of Flax, an `nnx.State`, plain dicts.
      optimizer: of those that train.
      is_trained: path of a parameter, such as `layers/0/kernel` -> True if it trains;
        integers never do.

    Returns:
      State.

    Raises:
      errors.SettingsError: at a leaf that is no array, or if nothing trains.
    """
    trained, frozen = partition.split(params, is_trained)
    if not jax.tree.leaves(trained):
        partition.check_any_trains(frozen)
    # Copies, since `apply` uses up what it is given.
    trained, opt_state = jax.tree.map(jnp.copy, (trained, optimizer.init(trained)))
    return State(
        partition.merge(trained, frozen),
        opt_state,
        jnp.zeros((), jnp.int32),
        jnp.ones((), bool),
        optimizer,
        is_trained,
    )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), tree)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _taken(
    optimizer: optax.GradientTransformation, trained: Any, opt_state: Any, grads: Any
) -> tuple[tuple[Any, Any], jax.Array]:
    differs = codec_lib.difference(_shapes(trained), _shapes(grads))
    if differs is not None:
        raise errors.SettingsError(
            f"state.apply(grads): the parameters that train have {differs[0]}, the"
            f" gradient has {differs[1]}: give it that of state.params, with the"
            " is_trained that the half has too"
        )

    def update(params: Any, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return train_state.update_if_finite(grads, update, trained, opt_state)
