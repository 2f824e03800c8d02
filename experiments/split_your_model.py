"""A decoder of your own, here of NNX on Python's source, trained in two clusters.

    python -m experiments.split_your_model --wan=60mbit,15ms --codec="int8(64)"

starts both here; the same command goes on after a kill. On two machines:

    ... --cluster=back --listen=0.0.0.0:7070 --tls=FOLDER
    ... --cluster=front --peer=b.example:7070 --tls=FOLDER
"""

import functools
import os
import pathlib

import numpy as np
import optax
from flax import nnx

import nebula_jax as nebula

WIDTH, LENGTH, BATCH, MICRO_BATCHES = 64, 64, 32, 4
OPTIMIZER = optax.adamw(3e-3)


class Block(nnx.Module):
    """A causal attention and a feed-forward layer, each after a norm."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(
            4, WIDTH, use_bias=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h):
        h += self.attend(self.norms[0](h), mask=nnx.make_causal_mask(h[..., 0]))
        return h + self.down(nnx.gelu(self.up(self.norms[1](h))))


RNGS = nnx.Rngs(0)
embed, head = nnx.Embed(128, WIDTH, rngs=RNGS), nnx.Linear(WIDTH, 128, rngs=RNGS)
FRONT, FRONT_PARAMS = nnx.split(nnx.Sequential(embed, Block(RNGS)))
BACK, BACK_PARAMS = nnx.split(nnx.Sequential(Block(RNGS), head))


@functools.cache
def text():
    """Returns Python's own library, as bytes below 128."""
    paths = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:40]
    found = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    return found[found < 128].astype(np.int32)


def micro_batches(step, offset):
    """Returns rows and ids (offset 0) or targets (offset 1) of a step.

    The rows, [B], are where each begins in the text, the same in both parts, which
    compare them; ids and targets are M times [B / M, L].
    """
    begins = np.random.default_rng(step).integers(len(text()) - LENGTH - 1, size=BATCH)
    rows = text()[begins[:, None] + np.arange(LENGTH) + offset]
    return begins, np.split(rows, MICRO_BATCHES)


# All it takes to split a model.


def front(params, ids, rng):
    return nnx.merge(FRONT, params)(ids)


def back(params, h, targets, rng):
    logits = nnx.merge(BACK, params)(h)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train_front(run):
    half = nebula.cut.front(front, codec=run.codec)
    state = nebula.state(FRONT_PARAMS, OPTIMIZER)
    with run.dial("back") as link:
        line = half.open(link, hidden())
        state, line = run.restore(state, line)
        for step, (rows, batch) in run.batches(lambda step: micro_batches(step, 0)):
            grads, line, _ = half.step(state.params, batch, run.key, step, line, rows)
            state = state.apply(grads)
            run.done(step, (state, line))


def train_back(run):
    half = nebula.cut.back(back, codec=run.codec)
    state = nebula.state(BACK_PARAMS, OPTIMIZER)
    with run.listen("front") as link:
        line = half.open(link, hidden())
        state, line = run.restore(state, line)
        for step, (rows, batch) in run.batches(lambda step: micro_batches(step, 1)):
            grads, line, metrics = half.step(
                state.params, batch, run.key, step, line, rows
            )
            state = state.apply(grads)
            run.done(step, (state, line), metrics)


def hidden():
    """Returns the shape of what crosses for a micro-batch."""
    return nebula.cut.spec(front, FRONT_PARAMS, micro_batches(1, 0)[1][0])


if __name__ == "__main__":
    nebula.main({"front": train_front, "back": train_back})
