import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nebula_jax.models import activations
from nebula_jax.parallel import mesh as mesh_lib


def double(array, *axes):
    return activations.place(array * 2, *axes)


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((activations.ROWS,), PartitionSpec(("data", "fsdp"), None)),
        ((None, "model"), PartitionSpec(None, "model")),
        (("data", "fsdp"), PartitionSpec("data", None)),  # 2 does not divide 3
    ],
)
def test_an_array_lies_where_its_axes_are_named_and_divide(axes, spec):
    mesh = mesh_lib.make_mesh(jax.devices()[:4], fsdp=2)
    array = jnp.arange(12.0).reshape(4, 3)
    placed = jax.jit(activations.on(mesh, lambda array: double(array, *axes)))(array)
    np.testing.assert_array_equal(placed, array * 2)
    assert placed.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)


def test_outside_of_a_wrapped_function_nothing_is_placed():
    array = jnp.ones(4)
    assert double(array, "data").sharding == array.sharding
    mesh = mesh_lib.make_mesh(jax.devices()[:4])

    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        activations.on(mesh, fails)()
    assert double(array, "data").sharding == array.sharding
