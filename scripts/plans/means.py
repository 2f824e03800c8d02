"""Means over a run of ABNet: the visits of its pairs.

B rows of a batch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.abnet import config
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.communication.wire import frames


def frame_bytes(run: config.Run, compression: codecs.Compression, arrays: Any) -> float:
    """Returns the bytes of a micro-batch's frame, the mean over first and later visits.

    Args:
      run: of the experiment; the codec chooses as at its last step.
      compression: in one direction, as a flag has it.
      arrays: a micro-batch, of which some codecs choose a shape by the contents.

    Raises:
      ValueError: if the codec cannot encode them.
    """
    agreed, made = run.agreed, selector.as_selector(compression.codec)
    state = jax.eval_shape(made.init, arrays)

    def sent(is_visited: bool) -> int:
        filled = jax.tree.map(functools.partial(_filled, is_visited), state)
        option = made.choose(arrays, filled, agreed.steps)
        payload = codec_lib.payload_spec(made.codecs[option], arrays)
        return frames.frame_bytes(frames.Tensor, codec_lib.nbytes(payload))

    later = sent(True)
    pairs = [leaf.size for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.bool_]
    if not pairs:
        return later
    visits = agreed.steps * agreed.batch_size
    first = min(*pairs, run.local.max_pairs or visits, visits) / visits
    return first * sent(False) + (1 - first) * later


def _filled(is_visited: bool, leaf: Any) -> Any:
    """Fills an array of a codec's state, without its memory: `delta`'s may be large.

    Booleans are there in `delta` alone: the pairs that were visited.
    """
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    value = is_visited and leaf.dtype == jnp.bool_
    return np.broadcast_to(np.asarray(value, leaf.dtype), leaf.shape)


def assumptions(run: config.Run) -> list[str]:
    """Returns what the means of a plan rest on; empty without any."""
    found = []
    if any("delta(" in text for text in run.agreed.codec_texts):
        found.append(
            "Bytes of delta are the mean over the run: the first visit of each pair"
            " crosses in full, and there are as many pairs as delta remembers, or"
            " --max_pairs if that is less."
        )
    return found
