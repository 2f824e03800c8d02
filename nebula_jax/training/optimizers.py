"""Adam, Muon, learning-rate schedules, a rate by layer (sections 4.1, 4.2).

D width, H heads, K head width.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from nebula_jax.training import partition

_LAYER = re.compile(r"(?:^|/)encoder/layer_(\d+)/")
_EMBEDDINGS = re.compile(r"(?:^|/)embeddings/")
_NO_DECAY = re.compile(r"(?:^|\W)(?:bias|scale)\W*$")
_MATRIX = re.compile(r"(?:^|/)(?:encoder/layer_\d+/.*|adapter_\d+/(?:down|up)/)kernel$")
_BETA1 = 0.9  # Adam's, of ELECTRA, 24hBERT and section 4.2
_ADAM_RMS = 0.2  # of Adam's updates, which Muon's are scaled to (2502.16982)


def linear_decay(peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Rises from 0 to `peak` over the warm-up, then falls linearly to 0 at the end.

    (ELECTRA's code multiplies the warm-up onto an already decaying rate; the paper
    has linear decay with 10k warm-up steps, which is this.)
    """
    warmup_steps = min(warmup_steps, total_steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, max(1, warmup_steps)),
            optax.linear_schedule(peak, 0.0, max(1, total_steps - warmup_steps)),
        ],
        [warmup_steps],
    )


def rise_and_fall(progress: jax.Array, warmup: float) -> jax.Array:
    """Computes the shape of `linear_decay`, of the progress of a run, [] float32.

    Returns the share of the peak, [] float32: from 0 to 1 at the warm-up's end, and to
    0 at progress 1. `warmup` is the share of the run in which the rate rises (24hBERT:
    6 % of the time).
    """
    rise = progress / warmup if warmup else jnp.ones_like(progress)
    fall = (1 - progress) / (1 - warmup) if warmup < 1 else rise
    return jnp.clip(jnp.minimum(rise, fall), 0, 1)


def inverse_square_root(
    peak: float = 5e-4, warmup_steps: int = 4000, initial: float = 1e-7
) -> optax.Schedule:
    """Rises from `initial` to `peak` over the warm-up, then falls as 1 / sqrt(step).

    Section 4.2 names Adam with β 0.9 and 0.98, ε 1e-8 and 4000 warm-up steps, and so
    means fairseq's schedule; the rates are those of ABNet's code.
    """
    warmup_steps = max(1, warmup_steps)
    rise = optax.linear_schedule(initial, peak, warmup_steps)

    def schedule(step: jax.Array) -> jax.Array:
        fall = peak * (warmup_steps / jnp.maximum(step, warmup_steps)) ** 0.5
        return jnp.where(step < warmup_steps, rise(step), fall)

    return schedule


def adam(
    schedule: optax.Schedule,
    *,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """Makes Adam after clipping by global norm, with decoupled weight decay.

    β2 and ε are ELECTRA's by default. Parameters called `bias` or `scale` do not decay.
    A `clip_norm` of 0 clips nothing.
    """
    return optax.chain(
        clip(clip_norm),
        optax.scale_by_adam(_BETA1, beta2, epsilon),
        optax.add_decayed_weights(weight_decay, mask=_has_decay),
        optax.scale_by_learning_rate(schedule),
    )


def muon(
    schedule: optax.Schedule,
    *,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """Makes Muon (optax.contrib) for hidden matrices, Nesterov's Adam for the others.

    The others are embeddings, heads, biases and layer norms. Kernels of attention are
    orthogonalized as the matrices they stand for: [D, H, K] as D x HK, [H, K, D] as
    HK x D. Updates of both kinds are of a size, so the rates of Adam fit. Muon's
    momentum is 0.95; hidden matrices alone decay; norms are clipped as by `adam`.
    """
    return optax.chain(
        clip(clip_norm),
        contrib.muon(
            schedule,
            eps=1e-6,
            weight_decay=weight_decay,
            adam_b1=_BETA1,
            adam_b2=beta2,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=_ADAM_RMS,
        ),
    )


BY_NAME = {"adamw": adam, "muon": muon}


def clip(norm: float) -> optax.GradientTransformation:
    """Clips gradients by their global norm; 0 for no clipping."""
    return optax.clip_by_global_norm(norm) if norm else optax.identity()


def _matrices(params: Any) -> Any:
    """Returns a tree of the dimensions of hidden matrices, None for the others."""

    def dimensions(path: str, leaf: jax.Array) -> Any:
        if not _MATRIX.search(path):
            return None
        # [D, H, K] and [H, K, D]; what is read is before what is written.
        read = 2 if path.endswith("attention/output/kernel") else 1
        axes = tuple(range(leaf.ndim))
        return contrib.MuonDimensionNumbers(axes[:read], axes[read:])

    return partition.map_named(dimensions, params)


def _has_decay(params: Any) -> Any:
    """Returns a tree of bool: False for biases and layer norms, by name."""
    # Not by rank: the biases of queries, keys and values are [H, K].
    return partition.map_named(lambda path, _: not _NO_DECAY.search(path), params)


def layer_factor(path: str, decay: float, layers: int) -> float:
    """Returns the factor on the learning rate of a parameter.

    Layer i of an encoder of n layers, counted from 0, learns at d^(n-i) of the rate, so
    the top one at d; embeddings at d^(n+1); heads at the whole rate. That is ERNIE's
    rule, and what ELECTRA intended: its code gives the top layer d^2, left over from a
    pooler.

    >>> layer_factor("encoder/layer_11/output/kernel", decay=0.8, layers=12)
    0.8
    """
    layer = _LAYER.search(path)
    if layer:
        return decay ** (layers - int(layer[1]))
    return decay ** (layers + 1) if _EMBEDDINGS.search(path) else 1.0


def scale_by_layer(decay: float, layers: int) -> optax.GradientTransformation:
    """Multiplies each parameter's update by its `layer_factor`; last in a chain.

    Smaller steps for lower layers (ELECTRA; ERNIE-M's fine-tuning, section 4.1):

        optax.chain(optimizers.adam(rates), optimizers.scale_by_layer(0.8, layers=12))
    """

    def scale(path: str, update: jax.Array) -> jax.Array:
        return update * layer_factor(path, decay, layers)

    return optax.stateless(lambda updates, _: partition.map_named(scale, updates))
