"""Parts of every tensorflow_datasets builder whose data is on this machine."""

import contextlib
from collections.abc import Iterator

from absl import logging

from nebula_jax import installed

with installed.extra("experiments"):
    import tensorflow_datasets as tfds


class LocalInfo(tfds.core.DatasetInfo):
    """A dataset's description that TFDS does not look for in its own storage.

    The search would go over the network, and leave an empty folder among the temporary
    ones each time that a dataset is opened.
    """

    def initialize_from_bucket(self) -> None:
        """Finds nothing."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences TFDS's progress bars and banners; the callers report progress."""
    tfds.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(None):
            yield
    finally:
        logging.set_verbosity(before)
