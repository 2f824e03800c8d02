"""A flag of XLA without which JAX 0.10.2 to 0.12.0.1 compute wrong numbers on CPUs.

XLA hands some reductions on CPUs to a library (YNNPACK). In all these releases `max`
and `min` of some thousand values forget a NaN among them, so that a codec would send
numbers for what was none. And 0.10.2, the last release for Python 3.11, leaves out rows
of products with two or three columns and more than 32,768 rows
(https://github.com/jax-ml/jax/issues/39103), and ends the process at some reductions of
seven axes (https://github.com/jax-ml/jax/issues/40412). XLA's own reductions are right.
They take up to twice as long. Matrix products stay with the library.
"""

import contextlib
import importlib.metadata
import os
import sys
import warnings

# A list, because a process ends at once if a later XLA does not know the flag any more.
WRONG = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")
"""The releases of jaxlib that need the flag."""
NAME = "--xla_cpu_experimental_ynn_fusion_type"
OWN_REDUCTIONS = f"{NAME}=-LIBRARY_FUSION_TYPE_REDUCE"


def added(given: str) -> str:
    """Returns XLA_FLAGS with the flag, or as they are if they have one of its name."""
    return given if NAME in given else f"{given} {OWN_REDUCTIONS}".strip()


def _has_started() -> bool:
    """Tells if JAX has begun to compute: then it reads XLA_FLAGS no more."""
    if "jax" not in sys.modules:
        return False
    import jax

    before = jax.config.values["jax_num_cpu_devices"]
    try:
        # Refused from then on, unless nothing would change.
        jax.config.update("jax_num_cpu_devices", before - 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def mend() -> None:
    """Adds the flag to this process's environment and so to that of those it starts.

    Warns if it is too late. Imports JAX only if it has been imported before.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        given = os.environ.get("XLA_FLAGS", "")
        version = importlib.metadata.version("jaxlib")
        if version not in WRONG or NAME in given:
            return
        os.environ["XLA_FLAGS"] = added(given)
        if _has_started():
            warnings.warn(
                f"jaxlib {version} computes some reductions on CPUs wrongly (its max "
                "forgets NaN), and JAX has already started without the flag that mends "
                "it: import nebula_jax before JAX computes anything, or set "
                f"XLA_FLAGS={OWN_REDUCTIONS}",
                RuntimeWarning,
                stacklevel=3,
            )
