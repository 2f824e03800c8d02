"""Compiled programs, cached by JAX by program, flags of XLA and release."""

import hashlib
import os
import pathlib

import jax

PREFIX = "JAX_COMPILATION_CACHE"
VARIABLE = f"{PREFIX}_DIR"
"""JAX's own: another folder, for whoever sets it; JAX_ENABLE_COMPILATION_CACHE=0 has
nothing kept."""
MOST_BYTES = 2 * 2**30
"""Bytes of programs that are kept; JAX removes first what was not used for longest."""


def folder() -> pathlib.Path:
    """Returns this user's folder for this kind of processor: a home may be shared."""
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches) / "nebula_jax" / "programs" / _processor()


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "any"
    first = [line for line in lines if line.startswith(("model name", "flags"))][:2]
    return hashlib.sha256("".join(first).encode()).hexdigest()[:12]


def keep() -> None:
    """Lets JAX keep programs there, in this process and in those that it starts."""
    if VARIABLE in os.environ or jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        kept = folder()
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or none to write to: nothing is kept
        return
    for name, value in ((VARIABLE, str(kept)), (f"{PREFIX}_MAX_SIZE", MOST_BYTES)):
        if name not in os.environ:
            os.environ[name] = str(value)
            jax.config.update(name.lower(), value)
