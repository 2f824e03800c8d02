"""A channel of one process: the arrays that a receiver has, and their bytes.

B rows of a micro-batch, N rows, L length, D width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, loopback, selector


class Received(NamedTuple):
    """The arrays of a receiver.

    arrays: [N, L, D] float32, decoded.
    ratio: bytes of the payloads over those of padded float32, as in Table 5 but for the
      heads of frames. Of a codec that sends differences, when it sends rows again.
    """

    arrays: np.ndarray
    ratio: float


class Line:
    """The two ends of a channel, whose programs are compiled once."""

    def __init__(self, codec: str, batch_size: int, length: int, width: int) -> None:
        """Opens the channel.

        Args:
          codec: as in a flag.
          batch_size: B; what a codec loses may depend on what is encoded together.
          length: L.
          width: D.
        """
        made = codecs.from_string(codec)
        self._codec = selector.as_selector(made)
        self._batch_size = batch_size
        self._spec = {
            "hidden": jax.ShapeDtypeStruct((batch_size, length, width), jnp.float32),
            "mask": jax.ShapeDtypeStruct((batch_size, length), jnp.bool_),
            "index": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        }
        self._carrier = loopback.Loopback()
        self._sender = self._carrier.sender("hidden", self._spec, made)
        self._receiver = self._carrier.receiver("hidden", self._spec, made)
        # A memory of every row: the second time, differences alone are sent.
        self._visits = 2 if "delta" in codec else 1

    def send(self, hidden: np.ndarray, mask: np.ndarray) -> Received:
        """Sends rows, micro-batch by micro-batch, as a run does.

        Args:
          hidden: [N, L, D] float32.
          mask: [N, L] bool.

        Returns:
          Received, at the first visit of every row.
        """
        for end in (self._sender, self._receiver):
            end.state = self._codec.init(self._spec)
        found = np.zeros(hidden.shape, np.float32)
        plain = 0
        for visit in range(self._visits):
            before, plain = self._carrier.sent["hidden"], 0
            for number, start in enumerate(range(0, len(hidden), self._batch_size)):
                rows = slice(start, start + self._batch_size)
                self._sender.send(1, self._arrays(hidden, mask, start), number)
                received = self._receiver.recv(1, number)
                if visit == 0:
                    got = jax.device_get(received["hidden"])
                    found[rows] = got[: len(found[rows])]
                plain += codec_lib.nbytes(self._spec["hidden"])
        return Received(found, (self._carrier.sent["hidden"] - before) / plain)

    def _arrays(self, hidden: np.ndarray, mask: np.ndarray, start: int) -> Any:
        """Returns a micro-batch; the last one is filled up with the first rows."""
        index = np.arange(start, start + self._batch_size) % len(hidden)
        arrays = {
            "hidden": hidden[index],
            "mask": mask[index],
            "index": index.astype(np.int32),
        }
        return jax.device_put(arrays)
