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
ALL_RIGHT = [str(2**30), "(3, 1, 2, 8, 8, 8)", "nan nan nan"]
VERSION = importlib.metadata.version("jaxlib")
IS_WRONG = VERSION in xla_flags.WRONG


def child(program, own=""):
    return children.python(
        "-c",
        program,
        env=os.environ | {"XLA_FLAGS": own, "JAX_ENABLE_COMPILATION_CACHE": "0"},
    )


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (f"import nebula_jax{WIDE}{SEVEN_AXES}{NOT_A_NUMBER}", ALL_RIGHT),
        (f"import jax, nebula_jax{WIDE}", ALL_RIGHT[:1]),
    ],
)
def test_what_jax_computes_wrongly_is_right(program, printed):
    """With three columns and many rows; over seven axes, where it ends; with a NaN."""
    done = child(program)
    assert (done.stdout.splitlines(), done.stderr) == (printed, "")


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
