"""A model of your own, a replica in each cluster, averaged every so many steps.

    python -m experiments.local_steps_your_model --clusters=3 --inner_steps=20

starts all here; the same command goes on after a kill. On two machines:

    ... --clusters=2 --cluster=replica:0 --listen=0.0.0.0:7070 --tls=FOLDER
    ... --clusters=2 --cluster=replica:1 --peer=a.example:7070 --tls=FOLDER
"""

import functools
import os
import pathlib

import jax
import numpy as np
import optax
from absl import flags
from flax import nnx

import nebula_jax as nebula

OPTIMIZER = optax.adamw(3e-3)
SETTINGS = {"inner_steps": 20, "codec": "e3m0(256)"}
WIDTH, CONTEXT, BATCH = 64, 8, 96


class Net(nnx.Module):
    """The next character from the eight before it."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(128, 16, rngs=rngs)
        self.hidden = nnx.Linear(16 * CONTEXT, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 128, rngs=rngs)

    def __call__(self, ids):
        h = self.embed(ids).reshape(len(ids), -1)
        return self.head(nnx.gelu(self.hidden(h)))


GRAPH, PARAMS = nnx.split(Net(nnx.Rngs(0)))


@functools.cache
def text():
    """Returns Python's own library, as bytes below 128."""
    paths = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:40]
    found = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    return found[found < 128].astype(np.int32)


def batch(step, rows=slice(None)):
    """Returns rows of a step's batch of all replicas: [B, CONTEXT + 1]."""
    begins = np.random.default_rng(step).integers(len(text()) - CONTEXT, size=BATCH)
    return text()[begins[rows, None] + np.arange(CONTEXT + 1)]


@jax.jit
@jax.value_and_grad
def loss_and_grads(params, rows):
    logits = nnx.merge(GRAPH, params)(rows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, -1])
    return losses.mean()


# All it takes to train a replica in each cluster.


def train(run, **more):
    state = nebula.state(PARAMS, OPTIMIZER)
    with run.meet() as peers:
        rounds = nebula.local_steps(run, peers, state.params, **SETTINGS | more)
        state, rounds = run.restore(state, rounds)
        rows = rounds.share.rows(BATCH)
        for step, mine in run.batches(lambda step: batch(step, rows)):
            loss, grads = loss_and_grads(state.params, mine)
            state = state.apply(grads)
            state = state.replace(params=rounds.after(step, state.params))
            run.done(step, (state, rounds), {"loss": loss})


if __name__ == "__main__":
    about = "Steps between two rounds, H."
    inner_steps = flags.DEFINE_integer("inner_steps", 20, about, lower_bound=1)
    nebula.main({"replica:*": lambda run: train(run, inner_steps=inner_steps.value)})
