"""Nebula-JAX: the cut, with the codecs that a variant names; the target listens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nebula_jax as nebula
from scripts.peers import task as task_lib
from scripts.peers import translator, with_nebula

CODECS = {  # variant -> codecs of the hidden states and of their gradient
    "float32": ("", ""),
    "fp16 and int8": ("fp16", "int8(tensor)"),
    "int4": ("hadamard|int4(64)", "hadamard|int4(64)"),
}

OPERATIONS = translator.Operations(
    with_nebula.GELU,
    functools.partial(jax.nn.standardize, epsilon=1e-5),
    jax.nn.dot_product_attention,
)


def front(
    params: dict[str, jax.Array], batch: translator.Batch, rng: jax.Array
) -> jax.Array:
    """Computes the hidden states of the source, [B, L, D] float32."""
    del rng  # nothing is drawn
    return translator.hidden(OPERATIONS, params, batch.source)


def back(
    params: dict[str, jax.Array],
    hidden: jax.Array,
    batch: translator.Batch,
    rng: jax.Array,
) -> jax.Array:
    """Computes the mean loss of the target, in nats."""
    del rng
    logits = translator.logits(OPERATIONS, params, batch.given, hidden)
    return with_nebula.mean_loss(logits, batch.wanted)


def micro_batches(task: task_lib.Task, step: int) -> list[translator.Batch]:
    """Returns the micro-batches of a step."""
    count = translator.MICRO_BATCHES
    parts = [np.split(each, count) for each in translator.batch(task, step)]
    return [translator.Batch(*each) for each in zip(*parts, strict=True)]


def part(task: task_lib.Task, run: nebula.Run) -> None:
    """Trains the source, or the target, which has the loss."""
    log, is_source = task_lib.Log(task), run.cluster == "source"
    forward, backward = CODECS[task.variant]
    make, fn = (nebula.cut.front, front) if is_source else (nebula.cut.back, back)
    half = make(fn, codec=forward, backward_codec=backward)
    params = jax.tree.map(jnp.asarray, translator.parameters(run.cluster))
    state = nebula.state(params, optax.adamw(task.rate, weight_decay=1e-4))
    rows, losses = task.batch // translator.MICRO_BATCHES, []
    shape = rows, translator.LENGTH, translator.WIDTH
    with run.dial("target") if is_source else run.listen("source") as link:
        line = half.open(link, jax.ShapeDtypeStruct(shape, jnp.float32))
        state, line = run.restore(state, line)
        for step, batch in run.batches(functools.partial(micro_batches, task)):
            grads, line, metrics = half.step(
                state.params, batch, run.key, step, line, identity=np.int32(step)
            )
            state = state.apply(grads)
            losses += [float(each) for each in metrics.values()]  # of the target
            log.round(step)
            run.done(step, (state, line))
    log.end(translator.loss(losses))


def train(task: task_lib.Task) -> None:
    """Trains as one of two clusters."""
    name = "source" if task.worker else "target"
    with_nebula.start(task, name, dict.fromkeys(translator.LAYERS, part), task.steps)
