"""Your own Flax model over two clusters: nothing of the model below is ours.

    python -m experiments.split_your_model --wan=60mbit,15ms --codec="int8(64)"

trains a small network that tells six shapes apart. Cluster `near` has the images and
the first layers, cluster `far` the labels and the rest; hidden states go one way, their
gradients the other. Then the same model is trained uncut, in one process: without
--codec all parameters agree to 1e-5, and both tell about 19 shapes of 20. It takes half
a minute on two cores. On two machines each runs its own part:

    ... --cluster=far --listen=0.0.0.0:7070 --tls=FOLDER
    ... --cluster=near --peer=far.example:7070 --tls=FOLDER

B batch, M micro-batches in it.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import linen as nn
from flax import serialization

import nebula_jax
from experiments import launcher, lifecycle, shared_flags
from nebula_jax.communication import bridge, codecs, wan
from nebula_jax.communication.wire import frames
from nebula_jax.parallel import pipeline
from nebula_jax.training import cut

flags.adopt_module_key_flags(shared_flags)

CODEC = flags.DEFINE_string(
    "codec", "", 'Of hidden states and of gradients, such as "int8(64)"; empty: none.'
)

SIDE = 16  # pixels
SHAPES = 6
BATCH, MICRO_BATCHES = 64, 4  # B, M
HIDDEN = jax.ShapeDtypeStruct((BATCH // MICRO_BATCHES, 4, 4, 32), jnp.float32)
HELD_BACK = 1_000_000  # number of the first batch that is not trained on
# A large ε, because the uncut model is to be compared with: otherwise Adam makes as
# much of a gradient that is 0 but for rounding as of any other.
OPTIMIZER = optax.adam(1e-2, eps=1e-3)
RNG = jax.random.key(0)  # this model draws nothing at random


class Stem(nn.Module):
    """[B, 16, 16, 1] -> [B, 4, 4, 32]."""

    @nn.compact
    def __call__(self, images):
        hidden = nn.gelu(nn.Conv(16, (3, 3), strides=2)(images))
        return nn.gelu(nn.Conv(32, (3, 3), strides=2)(hidden))


class Classifier(nn.Module):
    """[B, 4, 4, 32] -> [B, 6]."""

    @nn.compact
    def __call__(self, hidden):
        hidden = nn.gelu(nn.Conv(64, (3, 3))(nn.LayerNorm()(hidden)))
        return nn.Dense(SHAPES)(hidden.mean((1, 2)))


# All it takes to split a model, as quoted in README.md:


def front(params, images, rng):
    return Stem().apply({"params": params}, images)


def back(params, hidden, labels, rng):
    logits = Classifier().apply({"params": params}, hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) / BATCH
    hits = jnp.sum(logits.argmax(-1) == labels) / BATCH
    return losses.sum(), {"loss": losses.sum(), "accuracy": hits}


def train_near(link, params, batches, codec, zstd, record):
    half, state = cut.front(front, codec, codec), OPTIMIZER.init(params)
    hidden = link.sender("hidden", HIDDEN, codec, zstd)
    gradient = link.receiver("gradient", HIDDEN, codec, zstd)
    states = half.init_codecs(HIDDEN)
    link.wait_for_welcome(60.0)
    for step, images in enumerate(batches, 1):
        grads, states, _ = pipeline.front_step(
            *(half, params, images, RNG, step, hidden, gradient, states),
            ahead=MICRO_BATCHES,
        )
        params, state = update(params, state, grads)
        record(step, {})
    return params


def train_far(link, params, batches, codec, zstd, record):
    half, state = cut.back(back, codec, codec), OPTIMIZER.init(params)
    hidden = link.receiver("hidden", HIDDEN, codec, zstd)
    gradient = link.sender("gradient", HIDDEN, codec, zstd)
    states = half.init_codecs(HIDDEN)
    link.welcome(0)
    for step, labels in enumerate(batches, 1):
        grads, states, metrics = pipeline.back_step(
            half, params, labels, RNG, step, hidden, gradient, states
        )
        params, state = update(params, state, grads)
        record(step, metrics)
    return params


# The rest is the data, the uncut model, and the processes.


@jax.jit
def update(params, state, grads):
    """One step of the optimizer, of either half or of the whole."""
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train_whole(params: Any, batches: Iterator[Any]) -> Any:
    """The same model uncut, and the batch in one piece: what the split one must equal.

    Args:
      params: of both halves, {"near": ..., "far": ...}.
      batches: (images, labels) of each step.
    """

    @jax.jit
    def gradient(params, images, labels):
        def loss(params):
            hidden = front(params["near"], images, RNG)
            return back(params["far"], hidden, labels, RNG)

        return jax.grad(loss, has_aux=True)(params)[0]

    state = OPTIMIZER.init(params)
    for images, labels in batches:
        params, state = update(params, state, gradient(params, images, labels))
    return params


def init(seed: int, cluster: str) -> Any:
    """The parameters that a cluster begins with."""
    modules = {
        "near": (Stem(), (1, SIDE, SIDE, 1)),
        "far": (Classifier(), (1, *HIDDEN.shape[1:])),
    }
    module, shape = modules[cluster]
    rng = jax.random.fold_in(jax.random.key(seed), list(modules).index(cluster))
    return jax.jit(module.init)(rng, jnp.zeros(shape))["params"]


def draw(seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Batch `number`: images [B, 16, 16, 1] float32 in noise, labels [B] int32."""
    random = np.random.RandomState([seed, number])
    labels = random.randint(0, SHAPES, BATCH).astype(np.int32)
    center = random.uniform(6, 10, (2, BATCH, 1, 1))
    size = random.uniform(3, 5, (BATCH, 1, 1))
    y, x = np.abs(np.mgrid[:SIDE, :SIDE][:, None] - center)
    round_, square = np.hypot(x, y), np.maximum(x, y)
    shapes = [round_ < size, np.abs(round_ - size) < 1]  # disc, ring
    shapes += [square < size, np.abs(square - size) < 1]  # square, frame
    shapes += [(np.minimum(x, y) < 1) & (square < size)]  # plus
    shapes += [(np.abs(x - y) < 1) & (square < size)]  # cross
    images = np.stack(shapes)[labels, np.arange(BATCH)]
    images = images + random.normal(0, 0.3, images.shape)
    return images[..., None].astype(np.float32), labels


def micro_batches(seed: int, steps: int, part: int) -> Iterator[list[np.ndarray]]:
    """Of each step one part, images (0) or labels (1), in M pieces."""
    for number in range(steps):
        yield np.split(draw(seed, number)[part], MICRO_BATCHES)


def accuracy(params: Any, seed: int) -> float:
    """On 16 batches that were not trained on."""

    @jax.jit
    def hits(images, labels):
        hidden = front(params["near"], images, RNG)
        return back(params["far"], hidden, labels, RNG)[1]["accuracy"]

    numbers = range(HELD_BACK, HELD_BACK + 16)
    return float(np.mean([hits(*draw(seed, number)) for number in numbers]))


def difference(params: Any, others: Any) -> float:
    """The largest of any parameter."""
    apart = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), params, others)
    return float(max(jax.tree.leaves(apart)))


class Progress:
    """A line every --log_every steps: means of the steps since, bytes of a step."""

    def __init__(self, cluster: str, link: bridge.Link):
        self._cluster, self._link = cluster, link
        self._metrics: list[dict[str, jax.Array]] = []
        self._since, self._before = time.monotonic(), self._moved()

    def __call__(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes a step's metrics."""
        self._metrics.append(metrics)
        if step % shared_flags.LOG_EVERY.value and step != shared_flags.STEPS.value:
            return
        count = len(self._metrics)
        means = jax.tree.map(lambda *each: float(np.mean(each)), *self._metrics)
        words = [f"{self._cluster:<4} step {step:4d}/{shared_flags.STEPS.value}"]
        words += [f"{name} {value:.3f}" for name, value in means.items()]
        now, moved = time.monotonic(), self._moved()
        words.append(f"{1000 * (now - self._since) / count:.0f} ms/step")
        for direction, bytes_now in moved.items():
            each = (bytes_now - self._before[direction]) / count
            words.append(f"{each:,.0f} bytes/step {direction}")
        print("  ".join(words), flush=True)
        self._metrics, self._since, self._before = [], now, moved

    def _moved(self) -> dict[str, int]:
        return {way: self._link.bytes_moved(way) for way in ("sent", "received")}


def main() -> int:
    """Does what --cluster says."""
    shared_flags.check_shared_flags("far", "near")
    codecs.from_string(CODEC.value)
    match shared_flags.CLUSTER.value:
        case "all":
            with lifecycle.alone_in(shared_flags.workdir()):
                with launcher.prepared(("far", "near")) as launch:
                    status = launch("experiments.split_your_model", {})
                return status or _compare()
        case "near" | "far" as cluster:
            with lifecycle.alone_in(shared_flags.cluster_folder(cluster)):
                return _run(cluster)
        case other:
            raise shared_flags.FlagError(
                f"--cluster={other}: expected all, near or far"
            )


def _run(cluster: str) -> int:
    """Trains one half, and saves it."""
    lifecycle.Interrupt().install()
    agreed = {
        f"--{flag.name}": flag.value
        for flag in (CODEC, shared_flags.SEED, shared_flags.STEPS)
    }
    hello = frames.Hello(cluster, nebula_jax.__version__, agreed)
    lines = wan.from_string(shared_flags.WAN.value)
    settings = {
        "peer_timeout": shared_flags.PEER_TIMEOUT.value,
        "reconnect_timeout": shared_flags.RECONNECT_TIMEOUT.value,
        "log": lifecycle.say,
    }
    seed, steps = shared_flags.SEED.value, shared_flags.STEPS.value
    compression, params = codecs.from_string(CODEC.value), init(seed, cluster)
    if cluster == "near":
        batches = micro_batches(seed, steps, 0)
        with bridge.connect(
            shared_flags.host_and_port("peer", shared_flags.PEER.value),
            hello,
            connect_timeout=shared_flags.CONNECT_TIMEOUT.value,
            peer="far",
            tls=shared_flags.client_tls(),
            line=lines.up,
            **settings,
        ) as link:
            params = train_near(
                link, params, batches, *compression, Progress("near", link)
            )
    else:
        batches = micro_batches(seed, steps, 1)
        with (
            bridge.Listener(
                shared_flags.listening_socket(),
                hello,
                tls=shared_flags.server_tls(),
                line=lines.down,
                **settings,
            ) as listener,
            listener.accept(shared_flags.CONNECT_TIMEOUT.value) as link,
        ):
            params = train_far(
                link, params, batches, *compression, Progress("far", link)
            )
    path = shared_flags.cluster_folder(cluster) / "params.msgpack"
    path.write_bytes(serialization.to_bytes(params))
    return 0


def _compare() -> int:
    """Trains the model uncut, and says how far the split one is from it."""
    seed, steps = shared_flags.SEED.value, shared_flags.STEPS.value
    params = {cluster: init(seed, cluster) for cluster in ("near", "far")}
    split = {}
    for cluster, own in params.items():
        path = shared_flags.cluster_folder(cluster) / "params.msgpack"
        split[cluster] = serialization.from_bytes(own, path.read_bytes())
    batches = (draw(seed, number) for number in range(steps))
    whole = train_whole(params, batches)
    print(f"split: accuracy {accuracy(split, seed):.3f} on 1,024 new images")
    print(f"uncut: accuracy {accuracy(whole, seed):.3f}")
    print(f"largest difference of a parameter: {difference(split, whole):.1e}")
    return 0


if __name__ == "__main__":
    flags.set_default(shared_flags.STEPS, 150)
    lifecycle.run(main)
