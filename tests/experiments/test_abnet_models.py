import jax
import jax.numpy as jnp
import numpy as np

from experiments import abnet_models
from nebula_jax.models import transformer
from nebula_jax.parallel import mesh as mesh_lib


def test_frozen_matrices_are_placed_as_products_take_them():
    frozen = {
        "dense": {"kernel": np.ones((4, 4), np.float32), "bias": np.zeros(4, "f4")},
        "embeddings": {"embedding": np.full((3, 4), 1 / 3, np.float32)},
    }
    config = transformer.Config(
        vocab_size=3, layers=1, width=4, heads=1, feed_forward=4, max_length=2,
        dtype="bfloat16",
    )  # fmt: skip
    mesh = mesh_lib.make_mesh(jax.devices()[:1])
    placed = abnet_models.place_frozen(mesh, frozen, config)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, placed)
    assert dtypes == {
        "dense": {"kernel": jnp.bfloat16, "bias": jnp.float32},
        "embeddings": {"embedding": jnp.float32},
    }
