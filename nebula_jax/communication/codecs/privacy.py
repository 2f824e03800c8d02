"""What a site lets leave: tensors of a bounded norm, with noise.

A site asks for it in its `policy.json`, and its switch refuses a run whose codecs begin
otherwise (`security.policy`).
"""

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.codecs import leaves


def private(clip: float, noise: float = 0.0) -> codec_lib.Codec:
    """Scales a tensor down to an L2 norm of at most C, and adds Gaussian noise.

    The Gaussian mechanism of DP-SGD (Abadi et al. 2016, algorithm 1), with all that a
    cluster sends at once in the place of one example's gradient: x / max(1, |x| / C) +
    C z N(0, I), where |x| is of all floating-point leaves together. The first of its
    chain, since what follows then sees nothing else: `private(1, 0.5)|int8(64)`. Error
    feedback around it would send later what it took away.
    Payload and wire: the arrays. NaN and Inf make all values NaN.
    The noise is drawn from 64 random bits of the operating system's and a count, in the
    sender's state: no peer can draw it again. A run that resumes adds the same: if its
    data or settings are others, a peer learns the difference of two messages without
    noise. As all noise of floating-point numbers it leaves traces in their last bits.

    >>> codec = private(5)
    >>> codec.encode(jnp.array([30.0, 40.0]), ())[0].tolist()
    [3.0, 4.0]

    Args:
      clip: C, above 0, in the tensor's unit.
      noise: z, the noise multiplier: standard deviation over C; 0 for none.

    Raises:
      ValueError: if an argument is out of its range.
    """
    for name, value in (("clip", clip), ("noise", noise)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, not {value!r}")
    if not 0 < clip < float("inf"):
        raise ValueError(f"clip must be above 0, not {clip!r}")
    if not 0 <= noise < float("inf"):
        raise ValueError(f"noise must not be negative, not {noise!r}")

    # Every digit, but no more: two clusters, and a policy, compare names.
    shown = [repr(float(value)).removesuffix(".0") for value in (clip, noise)]
    name = f"private({', '.join(shown)})"

    def encode(
        arrays: codec_lib.Arrays, state: codec_lib.State
    ) -> tuple[codec_lib.Payload, codec_lib.State]:
        found = _clipped(leaves.floats(arrays), clip)
        if noise and found:
            key = jax.random.wrap_key_data(state["key"], impl="threefry2x32")
            keys = jax.random.split(jax.random.fold_in(key, state["count"]), len(found))
            found = [
                leaf + clip * noise * jax.random.normal(each, leaf.shape)
                for leaf, each in zip(found, keys, strict=True)
            ]
            state = {"key": state["key"], "count": state["count"] + 1}
        return leaves.with_floats(arrays, found), state

    init = functools.partial(_first_state, name, noise > 0)
    return codec_lib.identity()._replace(init=init, encode=encode, name=name)


def _first_state(name: str, has_noise: bool, spec: codec_lib.Spec) -> codec_lib.State:
    """Returns a sender's state; raises errors.SettingsError if there can be none."""
    for leaf in jax.tree.leaves(spec):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise errors.SettingsError(
                f"codec {name}: a complex leaf would leave as it is; give its real and"
                " imaginary part"
            )
    if not has_noise:
        return ()
    if jax.process_count() > 1:
        raise errors.SettingsError(
            f"codec {name}: noise is drawn by one process; this cluster has several"
        )
    seed = np.frombuffer(os.urandom(8), np.uint32)
    return {"key": jnp.asarray(seed), "count": jnp.uint32(0)}


def _clipped(found: list[jax.Array], clip: float) -> list[jax.Array]:
    """Scales arrays, in float32, to a norm of all together of at most `clip`."""
    found = [leaf.astype(jnp.float32) for leaf in found]
    norm = jnp.sqrt(sum((jnp.sum(leaf**2) for leaf in found), start=jnp.float32(0)))
    # 0 * Inf is NaN: a value that is not finite is not hidden by one that is.
    scale = jnp.where(norm > clip, clip / norm, 1) + 0 * norm
    return [leaf * scale for leaf in found]


DELTA = 1e-5  # δ, for which a run's report has ε
_NOISE = re.compile(r"private\([^,]+, ([^)]+)\)")


def described(
    codec: codec_lib.Codec, states: Sequence[codec_lib.State]
) -> dict[str, Any]:
    """Returns a report's figures of a codec's noise, by its senders' states; or {}."""
    found = _NOISE.match(codec.name)
    if not found or not (noise := float(found[1])):
        return {}
    firsts = [state[0] if isinstance(state, tuple) else state for state in states]
    messages = sum(int(first["count"]) for first in firsts)
    about = {"noise": noise, "messages": messages, "delta": DELTA}
    try:
        return about | {"epsilon": epsilon(noise, messages, DELTA)}
    except errors.SettingsError as error:
        return about | {"epsilon": str(error)}


def epsilon(noise: float, messages: int, delta: float = DELTA) -> float:
    """Returns ε of (ε, δ)-differential privacy after so many messages of `private`.

    Two data sets are neighbors if this cluster has nothing in one of them, and sends
    noise alone: nobody who reads every message can tell, but for (ε, δ), whether it
    took part. Which of two data sets it had is another question: messages then differ
    by up to 2 C, and the ε is that of noise / 2. By the Rényi accountant of
    `dp-accounting`, without subsampling.

    Args:
      noise: z, the noise multiplier.
      messages: that were sent; of local steps one a round and fragment.
      delta: δ.

    Raises:
      errors.SettingsError: if dp-accounting is not installed.
    """
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise errors.SettingsError(
            "dp-accounting is not installed: pip install nebula_jax[privacy]"
        ) from None
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise), messages)
    return float(accountant.get_epsilon(delta))
