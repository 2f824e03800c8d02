"""Parameters drawn with NumPy: to compile a module's own `init` takes seconds."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.models import masked_lm

SPLIT = {"query", "key", "value"}  # into heads: their kernels are [D, H, K]


def params(module, *inputs, seed=0, method=None):
    """Parameters of a module of linen, as large as trained ones."""
    init = functools.partial(module.init, jax.random.key(0), *inputs, method=method)
    random = np.random.RandomState(seed)

    def leaf(path, spec):
        names = [each.key for each in path]
        if spec.ndim < 2 or names[-1] == "bias":
            return jnp.float32((names[-1] == "scale") + 0.1 * random.randn(*spec.shape))
        rows = spec.shape[:-1] if SPLIT.isdisjoint(names) else spec.shape[:1]
        return jnp.float32(math.prod(rows) ** -0.5 * random.randn(*spec.shape))

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(init)["params"])


@functools.cache
def masked_language_model(config, seed=0):
    """Embeddings, encoder and MLM head of a configuration, as a checkpoint has them."""
    ids = np.zeros((1, 1), np.int32)
    return params(masked_lm.MaskedLM(config), ids, ids == 0, ids, seed=seed)
