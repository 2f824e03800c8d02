"""Nebula-JAX: train one model over several remote clusters joined by a slow line.

    import nebula_jax as nebula

These names are public, and stay; everything else may change with any version:

    main         the command of a script: starts its clusters, here or on real machines
    Run          one cluster's part in a run, where flags are not wanted
    cut          a model in parts that train as one: front, middle, back
    local_steps  a replica in each cluster, averaged every so many steps
    state        parameters and optimizer as one value
    codecs       what makes tensors small on the line, by name and to write
    errors       the class of every error that the library raises on purpose
"""

import importlib
from typing import TYPE_CHECKING, Any

from nebula_jax import xla_flags

__version__ = "0.3.0"

xla_flags.mend()  # before JAX starts

if TYPE_CHECKING:
    from nebula_jax import errors as errors
    from nebula_jax.commands.roles import main as main
    from nebula_jax.communication import codecs as codecs
    from nebula_jax.face import cut as cut
    from nebula_jax.face.local_steps import local_steps as local_steps
    from nebula_jax.face.run import Run as Run
    from nebula_jax.face.state import state as state

_PUBLIC = {
    "main": "nebula_jax.commands.roles:main",
    "Run": "nebula_jax.face.run:Run",
    "cut": "nebula_jax.face.cut",
    "local_steps": "nebula_jax.face.local_steps:local_steps",
    "state": "nebula_jax.face.state:state",
    "codecs": "nebula_jax.communication.codecs",
    "errors": "nebula_jax.errors",
}
"""Public name -> where it is; found when it is first used, as JAX takes long."""

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Returns a public name."""
    if name not in _PUBLIC:
        raise AttributeError(f"nebula_jax has no public name {name!r}: {__all__}")
    module, _, attribute = _PUBLIC[name].partition(":")
    found = importlib.import_module(module)
    found = getattr(found, attribute) if attribute else found
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
