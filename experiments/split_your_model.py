"""Your own Flax model over two clusters: the one below is not part of the library.

    python -m experiments.split_your_model --wan=60mbit,15ms --codec="int8(64)"

trains a small network that classifies images of six shapes. Cluster `front` has the
images and the first layers, cluster `back` the labels and the rest; hidden states go
one way, their gradients the other. Then the same model is trained uncut, in one
process: without --codec all parameters agree to 1e-5, and both classify about 19 of 20
images correctly. It takes half a minute on two cores. With --bottleneck=8 a learned
layer at the cut sends 8 columns in place of 32. On two machines each runs its own part:

    ... --cluster=back --listen=0.0.0.0:7070 --tls=FOLDER
    ... --cluster=front --peer=back.example:7070 --tls=FOLDER

B batch, M micro-batches in it.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import serialization

import nebula_jax
from experiments import shared_flags
from nebula_jax import errors, files
from nebula_jax.commands import fields
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import frames
from nebula_jax.models import bottleneck
from nebula_jax.parallel import pipeline
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import launcher, process
from nebula_jax.runtime.records import progress, run_folder
from nebula_jax.training import cut

SIDE = 16  # pixels
SHAPES = 6
BATCH, MICRO_BATCHES = 64, 4  # B, M
WIDTH = 32  # of the hidden states, D
HELD_OUT = 1_000_000  # number of the first batch that is not trained on
# A large ε, because the uncut model is to be compared with: otherwise Adam makes as
# much of a gradient that is 0 but for rounding as of any other.
OPTIMIZER = optax.adam(1e-2, eps=1e-3)
RNG = jax.random.key(0)  # every micro-batch gets its own; this model uses none
PARAMS = "params.msgpack"  # a trained half, in its cluster's folder


class Stem(nn.Module):
    """The first layers: [B, 16, 16, 1] -> [B, 4, 4, 32]."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        hidden = nn.gelu(nn.Conv(16, (3, 3), strides=2)(images))
        return nn.gelu(nn.Conv(WIDTH, (3, 3), strides=2)(hidden))


class Classifier(nn.Module):
    """The other layers: [B, 4, 4, 32] -> [B, 6]."""

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        hidden = nn.gelu(nn.Conv(64, (3, 3))(nn.LayerNorm()(hidden)))
        return nn.Dense(SHAPES)(hidden.mean((1, 2)))


# All it takes to split a model: so far as quoted in README.md, then the other half.


def front(params, images, rng):
    hidden = Stem().apply({"params": params["stem"]}, images)
    return bottleneck.narrow(params.get("narrow"), hidden)


def back(params, sent, labels, rng):
    hidden = bottleneck.widen(params.get("widen"), sent)
    logits = Classifier().apply({"params": params["classifier"]}, hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) / BATCH
    hits = jnp.sum(logits.argmax(-1) == labels) / BATCH
    return losses.sum(), {"accuracy": hits}


def train_front(link, params, batches, sent, codec, record):
    half, state = cut.front(front, codec, codec), OPTIMIZER.init(params)
    up = link.sender("hidden", sent, codec)
    down = link.receiver("gradient", sent, codec)
    states = half.init_codecs(sent)
    link.wait_for_welcome(60.0)
    for step, images in enumerate(batches, 1):
        grads, states, _ = pipeline.front_step(
            half, params, images, RNG, step, up, down, states, ahead=MICRO_BATCHES
        )
        params, state = update(params, state, grads)
        record(step, {})
    return params


def train_back(link, params, batches, sent, codec, record):
    half, state = cut.back(back, codec, codec), OPTIMIZER.init(params)
    hidden = link.receiver("hidden", sent, codec)
    gradient = link.sender("gradient", sent, codec)
    states = half.init_codecs(sent)
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
def update(
    params: Any, state: optax.OptState, grads: Any
) -> tuple[Any, optax.OptState]:
    """Takes a step of the optimizer, of either half or of the whole."""
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train_whole(params: Any, batches: Iterator[Any]) -> Any:
    """Trains the model uncut, on whole batches: what the split one must equal.

    Args:
      params: of both halves, {"front": ..., "back": ...}.
      batches: (images, labels) of each step.
    """

    @jax.jit
    def gradient(params: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            sent = front(params["front"], images, RNG)
            return back(params["back"], sent, labels, RNG)

        return jax.grad(loss, has_aux=True)(params)[0]

    state = OPTIMIZER.init(params)
    for images, labels in batches:
        params, state = update(params, state, gradient(params, images, labels))
    return params


def spec(rank: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of what crosses for a micro-batch.

    Args:
      rank: of the bottleneck; 0 without one.
    """
    shape = BATCH // MICRO_BATCHES, 4, 4, rank or WIDTH
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def init(seed: int, rank: int, cluster: str) -> Any:
    """Returns the parameters that a cluster begins with."""
    keys = [jax.random.fold_in(jax.random.key(seed), number) for number in range(3)]
    if cluster == "front":
        params = {"stem": _init(Stem(), keys[0], jnp.zeros((1, SIDE, SIDE, 1)))}
    else:
        hidden = jnp.zeros((1, 4, 4, WIDTH))
        params = {"classifier": _init(Classifier(), keys[1], hidden)}
    if rank:
        of_front, of_back = cut.bottleneck(WIDTH, rank).init(keys[2])
        params |= {"narrow": of_front} if cluster == "front" else {"widen": of_back}
    return params


def _init(module: nn.Module, key: jax.Array, inputs: jax.Array) -> Any:
    return jax.jit(module.init)(key, inputs)["params"]


def draw(seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws batch `number`: noisy images [B, 16, 16, 1] float32, labels [B] int32."""
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
    """Yields one part of each step's batch, images (0) or labels (1), in M pieces."""
    for number in range(steps):
        yield np.split(draw(seed, number)[part], MICRO_BATCHES)


def accuracy(params: Any, seed: int) -> float:
    """Returns the accuracy on 16 batches that were not trained on."""

    @jax.jit
    def hits(images: jax.Array, labels: jax.Array) -> jax.Array:
        sent = front(params["front"], images, RNG)
        return back(params["back"], sent, labels, RNG)[1]["accuracy"]

    numbers = range(HELD_OUT, HELD_OUT + 16)
    return float(np.mean([hits(*draw(seed, number)) for number in numbers]))


def difference(params: Any, others: Any) -> float:
    """Returns the largest difference of any parameter."""
    apart = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), params, others)
    return float(max(jax.tree.leaves(apart)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The flags of a process, besides how it reaches the other one."""

    cluster: str
    workdir: pathlib.Path
    codec: str = fields.to_begin_with(
        "",
        'Codec of hidden states and their gradients, such as "int8(64)"; empty for'
        " none.",
    )
    bottleneck: int
    seed: int
    steps: int
    log_every: int
    """Steps."""

    def check(self) -> None:
        """Raises errors.NebulaError at what cannot work."""
        codec = codecs.from_string(self.codec)
        if self.bottleneck > WIDTH:
            raise errors.SettingsError(
                f"--bottleneck={self.bottleneck}: expected 1 to {WIDTH} columns"
            )
        try:
            for each in selector.variants(codec):
                codec_lib.payload_spec(each, spec(self.bottleneck))
        except (TypeError, ValueError) as error:
            raise errors.SettingsError(f"--codec={self.codec}: {error}") from None


FLAGS = fields.define(Run, connect.Settings)


def printer(run: Run, link: Link) -> Callable[[int, dict[str, jax.Array]], None]:
    """Returns a function of a step and its metrics that prints a line now and then.

    A line has the means since the last one: metrics, time and bytes of a step.
    """
    pending, before = [], (time.monotonic(), progress.traffic([link]))
    link.work.begin()

    def record(step: int, metrics: dict[str, jax.Array]) -> None:
        nonlocal before
        link.work.step_done()
        pending.append(metrics)
        if step % run.log_every and step != run.steps:
            return
        (since, moved), count = before, len(pending)
        before = now, moved_now = time.monotonic(), progress.traffic([link])
        means = jax.tree.map(lambda *each: float(np.mean(each)), *pending)
        pending.clear()
        line = [f"{run.cluster:<5} step {step:4d}/{run.steps}"]
        line += [f"{name} {value:.3f}" for name, value in means.items()]
        line += [f"{1000 * (now - since) / count:.0f} ms/step"]
        for way in ("sent", "received"):
            size = getattr(moved_now, way) - getattr(moved, way)
            line.append(f"{size / count:,.0f} bytes/step {way}")
        process.progress("  ".join(line))

    return record


def main() -> int:
    """Runs the part that --cluster names."""
    run, connection = fields.read(Run), fields.read(connect.Settings)
    connect.check_role(connection, run.cluster, "back", "front")
    run.check()
    match run.cluster:
        case "all":
            with run_folder.lock(run.workdir):
                with launcher.prepared(
                    run.workdir, ("back", "front"), connection
                ) as launch:
                    status = launch(
                        "experiments.split_your_model",
                        lambda name, reach: arguments(run, name, reach),
                    )
                return status or compare(run)
        case "front" | "back":
            folder = run_folder.of_cluster(run.workdir, run.cluster)
            with run_folder.lock(folder):
                params = train(run, connection)
                with files.writing(folder / PARAMS) as partial:
                    partial.write_bytes(serialization.to_bytes(params))
            return 0
        case other:
            raise errors.SettingsError(
                f"--cluster={other}: expected all, front or back"
            )


def arguments(run: Run, cluster: str, reach: connect.Settings) -> list[str]:
    """Returns the flags of one cluster's process."""
    values = dataclasses.asdict(run) | dataclasses.asdict(reach) | {"cluster": cluster}
    return [f"--{name}={value}" for name, value in values.items()]


def train(run: Run, connection: connect.Settings) -> Any:
    """Trains one half; returns its parameters."""
    process.Interrupt().install()
    settings = {f"--{each}": getattr(run, each) for each in ("codec", "seed", "steps")}
    settings["--bottleneck"] = run.bottleneck
    hello = frames.Hello(run.cluster, nebula_jax.__version__, settings)
    params = init(run.seed, run.bottleneck, run.cluster)
    about = spec(run.bottleneck), codecs.from_string(run.codec)
    if run.cluster == "front":
        images = micro_batches(run.seed, run.steps, 0)
        with connect.dial(connection, hello, peer="back") as link:
            return train_front(link, params, images, *about, printer(run, link))
    labels = micro_batches(run.seed, run.steps, 1)
    with connect.listen(connection, hello, ["front"]) as [link]:
        return train_back(link, params, labels, *about, printer(run, link))


def compare(run: Run) -> int:
    """Trains the model uncut; prints how far the split one is from it."""
    params = {name: init(run.seed, run.bottleneck, name) for name in ("front", "back")}
    split = {}
    for cluster, fresh in params.items():
        path = run_folder.of_cluster(run.workdir, cluster) / PARAMS
        split[cluster] = serialization.from_bytes(fresh, path.read_bytes())
    whole = train_whole(params, (draw(run.seed, n) for n in range(run.steps)))
    print(f"split: accuracy {accuracy(split, run.seed):.3f} on 1,024 new images")
    print(f"uncut: accuracy {accuracy(whole, run.seed):.3f}")
    print(f"largest difference of a parameter: {difference(split, whole):.1e}")
    return 0


if __name__ == "__main__":
    shared_flags.run(main, {"steps": 150}, names=FLAGS)
