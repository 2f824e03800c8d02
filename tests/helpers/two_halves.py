"""A small model in two halves, and the same uncut: the oracle of what a cut computes.

And two links that have met, for halves in two threads. B batch, L length, D width.
"""

import concurrent.futures
import contextlib
import functools

import drawn
import flax.linen as nn
import jax
import jax.numpy as jnp
import links
import numpy as np
import trees

from nebula_jax.communication import wan
from nebula_jax.face import cut

B, L, D = 8, 6, 16
INPUTS = 5  # features of a position; a kernel's shape is no activation's


class Front(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(D, name="first")(x))
        return nn.tanh(nn.Dense(D, name="second")(x))


class Back(nn.Module):
    @nn.compact
    def __call__(self, hidden):
        return nn.Dense(1, name="last")(nn.tanh(nn.Dense(D, name="third")(hidden)))


def front(params, batch, rng):
    """Computes h, with the mask and the example numbers that codecs read."""
    hidden = Front().apply({"params": params}, batch["x"])
    keep = jax.random.bernoulli(rng, 0.9, (1, 1, D))
    return {"h": hidden * keep, "mask": batch["mask"], "index": batch["index"]}


def front_with_loss(params, batch, rng):
    """Computes h, and a loss of the front's own on its size."""
    hidden = front(params, batch, rng)
    return hidden, 0.1 * jnp.sum(hidden["h"] ** 2) / (B * L * D)


def back(params, hidden, batch, rng):
    """Squared error of real positions, over the whole batch's number of them."""
    del rng
    errors = (Back().apply({"params": params}, hidden["h"])[..., 0] - batch["y"]) ** 2
    loss = jnp.sum(errors * hidden["mask"]) / batch["weight"]
    return loss, {"loss": loss, "positions": jnp.sum(hidden["mask"])}


def whole_loss(params, micro_batches, keys, front=front):
    """The composition, uncut: the loss of all `pieces`, each with its keys."""
    total = 0.0
    for batch, rngs in zip(micro_batches, keys, strict=True):
        out = front(params[0], batch[0], rngs[0])
        hidden, own = (out, 0.0) if isinstance(out, dict) else out
        total += own + back(params[1], hidden, batch[1], rngs[1])[0]
    return total


@functools.cache
def init():
    front = drawn.params(Front(), jnp.zeros((1, L, INPUTS)))
    return front, drawn.params(Back(), jnp.zeros((1, L, D)), seed=1)


def rngs():
    """The run's keys, of both halves."""
    return jax.random.key(0), jax.random.key(1000)


def keys(count, step=1):
    """The keys of both halves for each micro-batch of a step."""
    of_step = [jax.random.fold_in(rng, step) for rng in rngs()]
    return [
        tuple(jax.random.fold_in(rng, number) for rng in of_step)
        for number in range(count)
    ]


def batch(seed=0):
    """Makes the front's and the back's inputs of a whole batch."""
    random = np.random.RandomState(seed)
    mask = np.arange(L) < random.randint(1, L + 1, (B, 1))
    x = random.randn(B, L, INPUTS).astype(np.float32)
    y = np.sin(x.sum(-1)).astype(np.float32)
    index = np.arange(B, dtype=np.int32)
    weight = np.full((), mask.sum(), np.float32)
    return {"x": x, "mask": mask, "index": index}, {"y": y, "weight": weight}


def pieces(whole, count):
    """Micro-batches of a batch, each of both halves'; a scalar is in all of them."""

    def piece(number):
        rows = slice(number * B // count, (number + 1) * B // count)
        return jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, whole)

    return [piece(number) for number in range(count)]


def spec_of(count, front=front, **settings):
    """The spec of h, of one of so many micro-batches."""
    return cut.spec(front, init()[0], pieces(batch(), count)[0][0], **settings)


def assert_close(got, want, atol=1e-6):
    """Two trees of one structure and nearly the same values."""
    trees.assert_close(got, want, atol=atol)


class Run:
    """Both halves without channels; keeps what crosses for the test to look at."""

    def __init__(self, front, back, spec):
        self.front, self.back, self.crossed = front, back, []
        self.states = [half.init_states(spec) for half in (front, back)]

    def step(self, params, micro_batches, keys, number=1):
        """Returns both halves' gradients, the front's loss, the back's metrics."""
        grads = [self.front.zero_grads(params[0]), self.back.zero_grads(params[1])]
        own_losses, metrics = [], []
        for batches, rngs in zip(micro_batches, keys, strict=True):
            front, back = zip(params, batches, rngs, strict=True)
            hidden, residuals, own, self.states[0] = self.front.forward(
                *front, self.states[0], number
            )
            hidden = jax.tree.map(np.asarray, hidden)  # as it comes off a line
            answer, grads[1], measured, self.states[1] = self.back.step(
                *back, hidden, self.states[1], grads[1], number
            )
            answer = jax.tree.map(np.asarray, answer)
            grads[0], self.states[0], _ = self.front.backward(
                *front, residuals, answer, self.states[0], grads[0]
            )
            self.crossed.append((hidden, answer))
            own_losses.append(own)
            metrics.append(measured)
        return tuple(grads), sum(own_losses), metrics


@contextlib.contextmanager
def met(line=""):
    """Links of the front and of the back half, over a socket of this machine."""
    lines = wan.from_string(line)
    server = {"ours": "back", "line": lines.down}
    client = {"theirs": "front", "peer": "back", "line": lines.up}
    with contextlib.ExitStack() as stack:
        pair = links.Pair(stack, server, client, peer_timeout=10.0)
        yield pair.there, pair.here


def both(front, back):
    """Runs two functions at the same time; returns the second's result first."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(front)
        return back(), other.result(30)
