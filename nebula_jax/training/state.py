"""The state of a model in training: parameters, optimizer, step and randomness."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct


@struct.dataclass
class TrainState:
    """The state of one model, sufficient to resume its training.

    step: [] int32, optimization steps taken.
    params: parameter tree, float32.
    opt_state: optax state.
    rng: [2] uint32, key data; step t draws from `key(t)`, so that the randomness of a
      step does not depend on where the run was resumed.
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    rng: jax.Array

    def key(self) -> jax.Array:
        """Returns the key of the coming step."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.rng), self.step)

    def apply_gradients(
        self, grads: Any, optimizer: optax.GradientTransformation
    ) -> "TrainState":
        """Returns the state after one optimization step."""
        updates, opt_state = optimizer.update(grads, self.opt_state, self.params)
        return dataclasses.replace(
            self,
            step=self.step + 1,
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
        )


@functools.partial(jax.jit, donate_argnums=0)
def running_mean(mean: Any, new: Any, count: jax.Array) -> Any:
    """Updates the mean of `count` trees of parameters.

    Args:
      mean: of the first count - 1, donated; not used if count is 1.
      new: the last tree.
      count: [] int32, at least 1.
    """
    before = (count - 1) / count
    return jax.tree.map(lambda old, leaf: old * before + leaf / count, mean, new)


def create(
    params: Any, optimizer: optax.GradientTransformation, rng: jax.Array
) -> TrainState:
    """Makes a state at step 0; `rng` is a key."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        rng=jax.random.key_data(rng),
    )
