"""What JAX computes wrongly without a flag, in processes without the suite's own."""

import importlib.metadata
import os

import children
import pytest

from nebula_jax import xla_flags

WIDE = """
import jax, jax.numpy as jnp
rows = jnp.arange(32_769, dtype=jnp.float32)
rows = jnp.stack([rows, 0 * rows, 0 * rows], axis=1)
squares = jax.jit(jax.vmap(lambda r: jnp.sum((jnp.eye(3) @ r) ** 2)))
print(int(squares(rows)[-1]))
"""
SEVEN_AXES = """
import jax, jax.numpy as jnp
numbers = jnp.ones((3, 1, 2, 2, 8, 8, 8))
print(jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(numbers, numbers).shape)
"""
NOT_A_NUMBER = """
import jax, jax.numpy as jnp
numbers = jnp.zeros((64, 64)).at[3, 3].set(jnp.nan)
rows = jax.jit(lambda x: jnp.max(jnp.abs(x), axis=-1))(numbers)
print(rows[3], jax.jit(jnp.max)(numbers), jax.jit(jnp.min)(numbers))
"""
VERSION = importlib.metadata.version("jaxlib")
IS_WRONG = VERSION in xla_flags.WRONG


def child(program, own=""):
    return children.python(
        "-c",
        program,
        env=os.environ | {"XLA_FLAGS": own, "JAX_ENABLE_COMPILATION_CACHE": "0"},
    )


@pytest.mark.parametrize("first", ["import nebula_jax", "import jax, nebula_jax"])
def test_products_with_three_columns_and_many_rows_are_right(first):
    done = child(first + WIDE)
    assert (done.stdout, done.stderr) == (f"{2**30}\n", "")


def test_a_reduction_of_seven_axes_ends():
    done = child("import nebula_jax" + SEVEN_AXES)
    assert (done.returncode, done.stdout) == (0, "(3, 1, 2, 8, 8, 8)\n"), done.stderr


def test_the_largest_of_numbers_with_a_nan_is_nan():
    done = child("import nebula_jax" + NOT_A_NUMBER)
    assert done.stdout == "nan nan nan\n", done.stderr


def test_flags_of_the_users_own_stay():
    program = "import os, nebula_jax; print(os.environ['XLA_FLAGS'])"
    own = "--xla_force_host_platform_device_count=3"
    expected = f"{own} {xla_flags.OWN_REDUCTIONS}" if IS_WRONG else own
    assert child(program, own).stdout.strip() == expected
    chosen = f"{xla_flags.NAME}=LIBRARY_FUSION_TYPE_DOT"
    assert xla_flags.added(chosen) == chosen
    assert xla_flags.added(own) == f"{own} {xla_flags.OWN_REDUCTIONS}"


def test_an_import_after_jax_has_started_says_so_once():
    start = "import jax; jax.numpy.zeros(3) + 1; import nebula_jax, nebula_jax.errors"
    said = child(start).stderr
    assert said.count(f"RuntimeWarning: jaxlib {VERSION} computes") == IS_WRONG
    assert (xla_flags.OWN_REDUCTIONS in said) == IS_WRONG
