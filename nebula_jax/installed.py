"""What pip has installed of this project: where its commands lie, and its extras."""

import contextlib
import pathlib
from collections.abc import Iterator

from nebula_jax import errors

PACKAGE = pathlib.Path(__file__).parent
IS_WHEEL = (PACKAGE / "bundled").is_dir()
"""True if pip copied the project, False if this is a checkout."""
FOLDER = PACKAGE / "bundled" if IS_WHEEL else PACKAGE.parent
"""The folder that has `experiments` and `scripts`: in a wheel they lie inside the
package, since a user's own folders may have these names."""


COMMAND = "nebula" if IS_WHEEL else "python -m"
"""What runs a module of that folder."""


class MissingExtra(errors.NebulaError, ModuleNotFoundError):
    """A library that only some parts need, and that is not installed."""


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Names the extra that brings a library, where importing it in the block fails.

    >>> with extra("plots"):
    ...     import no_such_library
    Traceback (most recent call last):
    nebula_jax.installed.MissingExtra: no_such_library is missing: \
pip install "nebula_jax[plots]"

    Extras are in pyproject.toml. Raises MissingExtra if a library is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # A module of our own that is not there is a mistake of ours.
        if isinstance(error, MissingExtra) or str(error.name).startswith("nebula_jax"):
            raise
        library = str(error.name).partition(".")[0]
        raise MissingExtra(
            f'{library} is missing: pip install "nebula_jax[{name}]"', name=error.name
        ) from error
