"""Measures a training step beside PyTorch's: its rate, its optimizations.

    python -m scripts.bench_training                        # tables, in some minutes
    python -m scripts.bench_training --out=training.json    # and their record

PyTorch's steps need the packages of requirements-parity.txt; without them, only
Nebula-JAX's run. All run in turn, round by round, in one process, with a thread for
each core, on random weights and text: a rate is that of the median step, a ratio the
median of the rounds' ratios. The second step of each turn is timed: the first one after
another library's is slower, presumably because its memory is gone. bfloat16 is
PyTorch's autocast, and here that of the operands of matrix products. The gain of each
optimization is measured by a step without it.

B batch, L length.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import flags
from flax import linen as nn

from experiments import shared_flags
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import classifier, electra, transformer
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from nebula_jax.training import (
    classification,
    m3,
    m3_steps,
    optimizers,
    partition,
)
from nebula_jax.training import state as train_state
from scripts.bench import harness, pytorch
from scripts.bench import report as bench_report
from scripts.bench.shapes import MASK_RATE, RATE, Shape, Step

DEFAULTS = {"rounds": 7}
"""Shared flags that have another default in this benchmark."""
WARM = 1  # steps in each turn before the one that is timed
LONGEST_BUCKET = 96  # tokens, of xnli_warm.flags
PYTORCH_RATE = 1.0  # bfloat16 over PyTorch's float32, at least

FINE_TUNING = Shape("fine-tuning, embeddings frozen", 12, 384, 12, 1536, 60_000, 32, 48)
MLM = Shape("masked LM, logits where masked", 6, 384, 12, 1536, 30_522, 16, 128)


def _adam():
    return optimizers.adam(lambda step: RATE, clip_norm=1.0)


def _init(module: nn.Module, seed: int, *arguments: Any) -> Any:
    """Draws a module's parameters; compiled, since one by one takes seconds."""
    init = jax.jit(lambda key: module.init(key, *arguments)["params"])
    return init(jax.random.key(seed))


def _kept(step: Callable[[Any], tuple[Any, Any]], state: Any) -> Step:
    """Makes a step that keeps its state."""

    def run():
        nonlocal state
        state, metrics = step(state)
        return state, metrics

    return run


def fine_tuning(shape: Shape, dtype: str, *, donates: bool = True) -> Step:
    """Makes `finetune_xnli`'s step.

    Args:
      shape: of model and batch.
      dtype: of the operands of matrix products.
      donates: True if its state is written in place.
    """
    config = classifier.Config(
        encoder=shape.config(dtype),
        special=vocabularies.SPECIAL,
        dropout=0.0,
    )
    ids = jnp.asarray(shape.ids())
    generator = _init(
        electra.Generator(config.encoder), 0, ids[:1], ids[:1] > 0, ids[:1, :1]
    )
    head = _init(classifier.Head(config), 1, jnp.zeros((1, shape.width)), True)
    params = {name: generator[name] for name in ("embeddings", "encoder")}
    params["classifier"] = head
    trained, frozen = partition.split(params, classification.is_trained)
    optimizer = _adam()
    state = train_state.create(trained, optimizer, jax.random.key(2))
    step = jax.jit(
        functools.partial(classification.step, config, optimizer, 1),
        donate_argnums=0 if donates else (),
    )
    right = jnp.asarray(shape.labels())
    return _kept(lambda state: step(state, frozen, ids, right), state)


def masked_lm(
    shape: Shape,
    dtype: str,
    *,
    donates: bool = True,
    mask_rate: float = MASK_RATE,
) -> Step:
    """Makes an M3 generator's step; `donates` as in `fine_tuning`."""
    config = m3.Config(
        generator=shape.config(dtype),
        discriminator=shape.config(dtype),
        steps=10_000,
        mask_rate=mask_rate,
        learning_rate=RATE,
    )
    state = jax.jit(lambda: m3.init_generator(config, 0, 0))()
    step = jax.jit(
        functools.partial(m3_steps.generator_step, config),
        donate_argnums=0 if donates else (),
    )
    ids = jnp.asarray(shape.ids())

    def step_fn(state):
        state, _, metrics = step(state, ids)
        return state, metrics

    return _kept(step_fn, state)


def without(shape: Shape) -> dict[str, Step]:
    """Returns optimization -> the bfloat16 step without it."""
    dtype, make = "bfloat16", MAKERS[shape.what][0]
    found = {
        "state written in place (donation)": make(shape, dtype, donates=False),
        "our attention, not jax.nn's": by_the_library(make(shape, dtype)),
    }
    if shape.what == FINE_TUNING.what:
        longest = shape._replace(length=LONGEST_BUCKET)
        return found | {"rows as long as their bucket, not 96": make(longest, dtype)}
    return found | {
        "logits where masked, not everywhere": make(shape, dtype, mask_rate=1)
    }


def by_the_library(step: Step) -> Step:
    """Replaces a step's attention by jax.nn.dot_product_attention."""

    def attend(query, read, attention_mask, config, drop):
        del drop  # none here
        cast = [
            each.astype(transformer.DTYPES[config.dtype]) for each in (query, *read)
        ]
        mask = jnp.broadcast_to(
            attention_mask[:, None, None, :],
            (len(query), 1, query.shape[1], attention_mask.shape[-1]),
        )
        found = jax.nn.dot_product_attention(*cast, mask=mask)
        return found.astype(jnp.float32)

    def run():
        with mock.patch.object(transformer, "attend", attend):
            return step()

    return run


MAKERS: Mapping[str, tuple[Callable[..., Step], Callable[..., Step]]] = {
    FINE_TUNING.what: (fine_tuning, pytorch.fine_tuning),
    MLM.what: (masked_lm, pytorch.masked_lm),
}
"""Shape -> what makes its step, here and in PyTorch."""


def steps(shape: Shape) -> dict[str, Step]:
    """Returns name -> step: in both precisions, and PyTorch's if it is installed."""
    libraries = ("here", "PyTorch") if pytorch.is_installed() else ("here",)
    return {
        f"{library}, {dtype}": make(shape, dtype)
        for library, make in zip(libraries, MAKERS[shape.what], strict=False)
        for dtype in transformer.DTYPES
    }


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Measures a shape's steps: rates, gains of the optimizations, profile."""
    named, optimizations = steps(shape), without(shape)
    seconds = harness.time_runs(named | optimizations, rounds, warm=WARM)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    whole = seconds["here, bfloat16"]

    def beside(name: str, dtype: str) -> float | None:
        other = seconds.get(f"PyTorch, {dtype}")
        return harness.ratio(other, seconds[name]) if other else None

    return {
        "what": shape.what,
        "shape": shape._asdict(),
        "steps": [
            {
                "name": name,
                "ms": 1e3 * medians[name],
                "tokens_per_second": shape.batch * shape.length / medians[name],
                "over_pytorch": beside(name, "float32"),
                "over_same": beside(name, name.partition(", ")[2]),
            }
            for name in named
        ],
        "gains": [
            {
                "measure": name,
                "ms": 1e3 * medians[name],
                "times": harness.ratio(seconds[name], whole),
            }
            for name in optimizations
        ],
    }


def targets(measured: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares what was measured with the targets."""
    found = []
    for each in measured:
        rates = {step["name"]: step["over_pytorch"] for step in each["steps"]}
        if rates["here, bfloat16"] is not None:
            what = f"{each['what']}: tokens/s in bfloat16 over PyTorch's in float32"
            found.append(report.at_least(what, rates["here, bfloat16"], PYTORCH_RATE))
    return found


def main() -> int:
    """Measures, prints the tables, and writes --out."""
    begin, rounds = time.monotonic(), flags.FLAGS["rounds"].value
    measured = []
    for shape in (FINE_TUNING, MLM):
        process.message(f"{shape.what}: compiling, then {rounds} rounds")
        measured.append(measure(shape, rounds))
    result = {"rounds": rounds, "measured": measured, "targets": targets(measured)}
    harness.finish(result, begin, bench_report.training)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, DEFAULTS, names=["out", "rounds"])
