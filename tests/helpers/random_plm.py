"""A pretrained language model with random weights; no `init` is compiled for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.models import electra


@functools.cache
def params(config, seed=5):
    """Embeddings, encoder and MLM head of a configuration, as a checkpoint has them.

    Weights are as large as trained ones: tokens differ, and layers mix them.
    """
    ids = jnp.zeros((1, 1), jnp.int32)
    init = electra.Generator(config).init
    shapes = jax.eval_shape(init, jax.random.key(seed), ids, ids == 0, ids)["params"]
    random = np.random.RandomState(seed)

    def leaf(path, spec):
        scale = path[-1].key == "scale"
        return np.float32(scale + 0.2 * random.randn(*spec.shape))

    return jax.tree_util.tree_map_with_path(leaf, shapes)
