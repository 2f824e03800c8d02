"""A model of plain JAX in three clusters in a row, with a dropout in each part.

    python -m experiments.chain_of_three --wan=60mbit,15ms

starts all three here, each behind an emulated line; the same command goes on after a
kill. On three machines each part dials the next:

    ... --cluster=back --listen=0.0.0.0:7070 --tls=FOLDER
    ... --cluster=middle --listen=0.0.0.0:7070 --peer=back.example:7070 --tls=FOLDER
    ... --cluster=front --peer=middle.example:7070 --tls=FOLDER
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nebula_jax as nebula

WIDTH, BATCH, MICRO_BATCHES = 32, 64, 4
OPTIMIZER = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.3, momentum=0.9))


def init(part):
    """Returns the parameters of a layer, and those that the two ends have besides."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), part), 2)
    own = jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5
    end = {0: (2, WIDTH), 2: (WIDTH, 2)}.get(part)
    return {"layer": own} | ({"end": jax.random.normal(keys[1], end)} if end else {})


def layer(params, h, rng):
    kept = jax.random.bernoulli(rng, 0.95, h.shape) / 0.95
    return h + jnp.tanh(h @ params["layer"]) * kept


def front(params, points, rng):
    return layer(params, points @ params["end"], rng)


def middle(params, h, nothing, rng):
    return layer(params, h, rng)


def back(params, h, labels, rng):
    logits = layer(params, h, rng) @ params["end"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}


def data(step):
    """Returns points of two spirals, and of which one each is, in micro-batches.

    And the step, first: the number of the batch, by which the parts compare it.
    """
    random = np.random.default_rng(step)
    labels, turn = random.integers(2, size=BATCH), random.uniform(0.5, 3, BATCH)
    angle = turn * np.pi + labels * np.pi
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], -1)
    split = np.split(points.astype(np.float32), MICRO_BATCHES)
    return step, split, np.split(labels.astype(np.int32), MICRO_BATCHES)


H1 = nebula.cut.spec(front, init(0), data(1)[1][0])
H2 = nebula.cut.spec(middle, init(1), H1, None)


def train(run, half, part, line, batch_of):
    """Trains a part: they differ in what they read alone."""
    state, line = run.restore(nebula.state(init(part), OPTIMIZER), line)
    for step, (number, batch) in run.batches(batch_of):
        grads, line, metrics = half.step(
            state.params, batch, run.key, step, line, identity=number
        )
        state = state.apply(grads)
        run.done(step, (state, line), metrics)


def train_front(run):
    half = nebula.cut.front(front, codec=run.codec, clip_norm=1.0)
    with run.dial("middle") as after:
        train(run, half, 0, half.open(after, H1), lambda step: data(step)[:2])


def train_middle(run):
    half = nebula.cut.middle(middle, codec=run.codec, clip_norm=1.0)
    with run.listen("front") as before, run.dial("back") as after:
        line = half.open(before, after, H1, H2)
        train(run, half, 1, line, lambda step: (step, [None] * MICRO_BATCHES))


def train_back(run):
    half = nebula.cut.back(back, codec=run.codec, clip_norm=1.0)
    with run.listen("middle") as before:
        train(run, half, 2, half.open(before, H2), lambda step: data(step)[::2])


if __name__ == "__main__":
    nebula.main({"front": train_front, "middle": train_middle, "back": train_back})
