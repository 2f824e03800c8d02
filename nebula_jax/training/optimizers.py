"""Adam, and how its rate rises and falls (sections 4.1, 4.2)."""

import jax
import jax.numpy as jnp
import optax


def linear_decay(peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """0 to `peak` over the warm-up, then straight down to 0 at the last step.

    (ELECTRA's code multiplies the warm-up onto an already decaying rate; the paper
    says linear decay with 10k warm-up steps, which is this.)
    """
    warmup_steps = min(warmup_steps, total_steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, max(1, warmup_steps)),
            optax.linear_schedule(peak, 0.0, max(1, total_steps - warmup_steps)),
        ],
        [warmup_steps],
    )


def inverse_square_root(
    peak: float = 5e-4, warmup_steps: int = 4000, initial: float = 1e-7
) -> optax.Schedule:
    """`initial` to `peak` over the warm-up, then peak sqrt(warm-up / step).

    Section 4.2 names Adam with β 0.9 and 0.98, ε 1e-8 and 4000 warm-up steps, and so
    means fairseq's schedule; the rates are those of ABNet's code.
    """
    warmup_steps = max(1, warmup_steps)
    rise = optax.linear_schedule(initial, peak, warmup_steps)

    def schedule(step):
        fall = peak * (warmup_steps / jnp.maximum(step, warmup_steps)) ** 0.5
        return jnp.where(step < warmup_steps, rise(step), fall)

    return schedule


def adam(
    schedule: optax.Schedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """Adam after clipping by global norm, with decoupled weight decay.

    Args:
      schedule: learning rate of each step.
      beta1, beta2, epsilon: Adam's; the defaults are ELECTRA's.
      weight_decay: not on biases and layer norms; 0 for none.
      clip_norm: largest global gradient norm; 0 for no clipping.

    Returns:
      An optax transformation.
    """
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    return optax.chain(
        clip,
        optax.scale_by_adam(beta1, beta2, epsilon),
        optax.add_decayed_weights(weight_decay, mask=_has_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _has_decay(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
