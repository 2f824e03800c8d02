"""Adapters of a frozen model, trained in two clusters: nothing but them crosses.

    python -m experiments.adapters_your_model --wan=10mbit,20ms

starts both here. Low-rank adapters (LoRA, arXiv 2106.09685) of a model that both have;
they are averaged every 20 steps. A model of yours goes where `frozen` is made.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nebula_jax as nebula

OPTIMIZER = optax.adam(1e-3)
SETTINGS = {"inner_steps": 20, "codec": "e3m0(256)"}
WIDTH, RANK, LAYERS, BATCH = 256, 4, 4, 64


def frozen():
    """Returns the model that is adapted: as if it came from a checkpoint."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]


def params():
    """Returns the model with its adapters: A is drawn, B is zero."""
    keys = jax.random.split(jax.random.key(1), LAYERS)
    return {
        "frozen": frozen(),
        "lora": [
            {
                "a": jax.random.normal(key, (WIDTH, RANK)) / WIDTH**0.5,
                "b": jnp.zeros((RANK, WIDTH)),
            }
            for key in keys
        ],
    }


def is_trained(path):
    return path.startswith("lora/")


def apply(params, x):
    for weight, lora in zip(params["frozen"], params["lora"], strict=True):
        x = jnp.tanh(x @ weight + x @ lora["a"] @ lora["b"])
    return x


def batch(step, rows=slice(None)):
    """Returns rows of a step's batch of all replicas: x and y, [B, WIDTH]."""
    x = np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)
    return x[rows], np.tanh(x[rows, ::-1])


@jax.jit
@jax.value_and_grad
def loss_and_grads(params, rows):
    x, y = rows
    return jnp.mean((apply(params, x) - y) ** 2)


# All it takes.


def train(run):
    state = nebula.state(params(), OPTIMIZER, is_trained=is_trained)
    with run.meet() as peers:
        rounds = nebula.local_steps(
            run, peers, state.params, is_trained=is_trained, **SETTINGS
        )
        state, rounds = run.restore(state, rounds)
        rows = rounds.share.rows(BATCH)
        for step, mine in run.batches(lambda step: batch(step, rows)):
            loss, grads = loss_and_grads(state.params, mine)
            state = state.apply(grads)
            state = state.replace(params=rounds.after(step, state.params))
            run.done(step, (state, rounds), {"loss": loss})


if __name__ == "__main__":
    nebula.main({"replica:*": train})
