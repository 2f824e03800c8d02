"""Nebula-JAX: the cut, with the codecs that a variant names; the target listens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

import nebula_jax as nebula
from nebula_jax.models import abnet, transformer
from scripts.peers import task as task_lib
from scripts.peers import translator, with_nebula

CODECS = {
    "float32": ("", ""),
    "fp16 and int8": ("fp16", "int8(tensor)"),
    "int4": ("hadamard|int4(64)", "hadamard|int4(64)"),
}
"""Variant -> codecs of the hidden states and of their gradient."""


def _encoder(layers: int) -> transformer.Config:
    return transformer.Config(
        vocab_size=task_lib.SYMBOLS,
        layers=layers,
        width=translator.WIDTH,
        heads=translator.HEADS,
        feed_forward=translator.FEED_FORWARD,
        max_length=translator.LENGTH,
    )


CONFIG = abnet.Config(
    source=_encoder(translator.SOURCE_LAYERS),
    target=_encoder(translator.TARGET_LAYERS),
    objective="ar",
    encoder_inner=translator.ENCODER_INNER,
    decoder_inner=translator.DECODER_INNER,
    heads=translator.DECODER_HEADS,
    dropout=0.0,
)


def front(params: dict, batch: translator.Batch, rng: jax.Array) -> jax.Array:
    """Computes the hidden states of the source, [B, L, D] float32."""
    del rng  # nothing is drawn
    return abnet.encode(CONFIG, params, batch.source, _all(batch.source)).hidden


def back(
    params: dict, hidden: jax.Array, batch: translator.Batch, rng: jax.Array
) -> jax.Array:
    """Computes the mean loss of the target, in nats."""
    del rng
    rows = batch.given, _all(batch.given), hidden, _all(batch.source)
    logits = abnet.Target(CONFIG).apply({"params": params}, *rows)
    loss = optax.softmax_cross_entropy_with_integer_labels
    return loss(logits, batch.wanted).mean()


def _all(ids: jax.Array) -> jax.Array:
    return jnp.ones(ids.shape, bool)


def init() -> dict[str, np.ndarray]:
    """Draws the parameters of both parts: `source/encoder/...` -> values."""
    ids = jnp.zeros((1, translator.LENGTH), jnp.int32)
    hidden = jnp.zeros((1, translator.LENGTH, translator.WIDTH))
    rows = ids, _all(ids)
    made = {
        "source": abnet.Source(CONFIG).init(jax.random.key(0), *rows)["params"],
        "target": abnet.Target(CONFIG).init(jax.random.key(1), *rows, hidden, rows[1])[
            "params"
        ],
    }
    flat = traverse_util.flatten_dict(made, sep="/")
    return {name: np.asarray(value) for name, value in flat.items()}


def micro_batches(task: task_lib.Task, step: int) -> list[translator.Batch]:
    """Returns the micro-batches of a step."""
    parts = [
        np.split(each, translator.MICRO_BATCHES)
        for each in translator.batch(task, step)
    ]
    return [translator.Batch(*each) for each in zip(*parts, strict=True)]


def train(task: task_lib.Task, run: nebula.Run, part: str) -> None:
    """Trains the source, or the target, which has the loss."""
    log, is_source = task_lib.Log(task), part == "source"
    forward, backward = CODECS[task.variant]
    make, fn = (nebula.cut.front, front) if is_source else (nebula.cut.back, back)
    half = make(fn, codec=forward, backward_codec=backward)
    values = translator.parameters(task, part)
    params = traverse_util.unflatten_dict(values, sep="/")
    optimizer = optax.adamw(task.rate, weight_decay=1e-4)
    state, losses = nebula.state(jax.tree.map(jnp.asarray, params), optimizer), []
    rows = task.batch // translator.MICRO_BATCHES
    shape = rows, translator.LENGTH, translator.WIDTH
    with run.dial("target") if is_source else run.listen("source") as link:
        line = half.open(link, jax.ShapeDtypeStruct(shape, jnp.float32))
        state, line = run.restore(state, line)
        for step in run.steps():
            batch = micro_batches(task, step)
            grads, line, metrics = half.step(
                state.params, batch, run.key, step, line, identity=np.int32(step)
            )
            state = state.apply(grads)
            run.done(step, (state, line))
            losses += [float(each) for each in metrics.values()]  # of the target
            log.round(step)
    log.end(None if is_source else translator.loss(losses))


def main() -> None:
    """Trains as one of two clusters."""
    task = task_lib.of_command()
    roles = {
        name: lambda task, run, name=name: train(task, run, name)
        for name in ("source", "target")
    }
    name = "source" if task.worker else "target"
    with_nebula.start(task, name, roles, checkpoint_every=task.steps)


if __name__ == "__main__":
    main()
