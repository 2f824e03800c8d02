"""Measures a training step beside PyTorch's: its rate, its parts, its optimizations.

    python -m scripts.bench_training                        # tables, in some minutes
    python -m scripts.bench_training --out=training.json    # and their record

PyTorch's steps need the packages of requirements-parity.txt; without them, only
Nebula-JAX's run. All run in turn, round by round, in one process, with a thread for
each core, on random weights and text: a rate is that of the median step, a ratio the
median of the rounds' ratios. The second step of each turn is timed: the first one after
another library's is slower, presumably because its memory is gone. bfloat16 is
PyTorch's autocast, and here that of the operands of matrix products. The gain of each
optimization is measured by a step without it; those of BERT's step are added one after
another (`bench/bert_levels.py`).

B batch, L length.
"""

import dataclasses
import functools
import pathlib
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
    losses,
    m3,
    m3_steps,
    masking,
    optimizers,
    partition,
    sampling,
)
from nebula_jax.training import state as train_state
from scripts.bench import bert_levels, interleave, pytorch
from scripts.bench import config as bench_config
from scripts.bench import report as bench_report
from scripts.bench import shapes as bench_shapes

flags.adopt_module_key_flags(bench_config)
flags.DEFINE_bool(
    "small_shapes", False, "Trains tiny shapes, to try the benchmark out."
)

DEFAULTS = {"rounds": 7}
"""Shared flags that have another default in this benchmark."""
WARM = 1  # steps in each turn before the one that is timed
LONGEST_BUCKET = 96  # tokens, of xnli_warm.flags
PYTORCH_RATE = 1.0  # bfloat16 over PyTorch's float32, at least


FINE_TUNING = bench_shapes.Shape(
    "fine-tuning, embeddings frozen", 12, 384, 12, 1536, 60_000, 32, 48
)
MLM = bench_shapes.Shape(
    "masked LM, logits where masked", 6, 384, 12, 1536, 30_522, 16, 128
)
SMALL = {"layers": 1, "width": 32, "heads": 2, "feed_forward": 64, "vocab_size": 100}


def _adam():
    return optimizers.adam(lambda step: bench_shapes.RATE, clip_norm=1.0)


def _init(module: nn.Module, seed: int, *arguments: Any) -> Any:
    """Draws a module's parameters; compiled, since one by one takes seconds."""
    init = jax.jit(lambda key: module.init(key, *arguments)["params"])
    return init(jax.random.key(seed))


def _kept(step: Callable[[Any], tuple[Any, Any]], state: Any) -> bench_shapes.Step:
    """Makes a step that keeps its state."""

    def run():
        nonlocal state
        state, metrics = step(state)
        return state, metrics

    return run


def fine_tuning(
    shape: bench_shapes.Shape, dtype: str, *, donates: bool = True
) -> bench_shapes.Step:
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
    ids = jnp.asarray(bench_shapes.tokens(shape))
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
    right = jnp.asarray(bench_shapes.labels(shape))
    return _kept(lambda state: step(state, frozen, ids, right), state)


def masked_lm(
    shape: bench_shapes.Shape,
    dtype: str,
    *,
    donates: bool = True,
    mask_rate: float = bench_shapes.MASK_RATE,
) -> bench_shapes.Step:
    """Makes an M3 generator's step; `donates` as in `fine_tuning`."""
    config = m3.Config(
        generator=shape.config(dtype),
        discriminator=shape.config(dtype),
        steps=10_000,
        mask_rate=mask_rate,
        learning_rate=bench_shapes.RATE,
    )
    state = jax.jit(lambda: m3.init_generator(config, 0, 0))()
    step = jax.jit(
        functools.partial(m3_steps.generator_step, config),
        donate_argnums=0 if donates else (),
    )
    ids = jnp.asarray(bench_shapes.tokens(shape))

    def step_fn(state):
        state, _, metrics = step(state, ids)
        return state, metrics

    return _kept(step_fn, state)


def parts(shape: bench_shapes.Shape, dtype: str) -> dict[str, bench_shapes.Step]:
    """Makes the parts of a step, forward and backward, each jitted by itself.

    Attention and feed-forward parts are one layer's; `layer` is a whole one.
    """
    config = shape.config(dtype)
    ids = jnp.asarray(bench_shapes.tokens(shape))
    hidden = jax.random.normal(
        jax.random.key(0), (shape.batch, shape.length, shape.width)
    )
    mask = ids != vocabularies.SPECIAL.pad
    attention, block = transformer.SelfAttention(config), transformer.Block(config)
    embeddings = transformer.Embeddings(config)

    def gradient(fn, *arguments) -> bench_shapes.Step:
        """Makes the gradient of the sum, in all floating-point arguments."""
        wanted = tuple(
            n
            for n, each in enumerate(arguments)
            if all(
                jnp.issubdtype(leaf.dtype, jnp.floating)
                for leaf in jax.tree.leaves(each)
            )
        )
        run = jax.jit(jax.grad(lambda *given: jnp.sum(fn(*given)), wanted))
        return lambda: run(*arguments)

    found = {
        "attention": gradient(
            lambda params, h: attention.apply({"params": params}, h, mask, True),
            _init(attention, 1, hidden, mask, True),
            hidden,
        ),
        "layer": gradient(
            lambda params, h: block.apply({"params": params}, h, mask, True),
            _init(block, 1, hidden, mask, True),
            hidden,
        ),
    }
    if shape.what == FINE_TUNING.what:
        table = _init(embeddings, 1, ids, True)
        look_up = jax.jit(lambda own: embeddings.apply({"params": own}, ids, True))
        found["embeddings"] = lambda: look_up(table)
        return found
    count = masking.capacity(bench_shapes.MASK_RATE, shape.length)
    generator = electra.Generator(dataclasses.replace(config, layers=0))
    positions = jnp.broadcast_to(jnp.arange(count), (shape.batch, count))
    ones = jnp.ones(positions.shape)

    def head(params):
        logits = generator.apply({"params": params}, ids, mask, positions)
        return losses.mean(losses.masked_cross_entropy(logits, positions, ones))

    sample = jax.jit(lambda logits: sampling.categorical(jax.random.key(2), logits))
    logits = jnp.zeros((shape.batch, count, shape.vocab_size))
    return found | {
        "embeddings and head": gradient(
            head, _init(generator, 1, ids, mask, positions)
        ),
        "sampling": lambda: sample(logits),
    }


def profile(
    shape: bench_shapes.Shape, seconds: Mapping[str, list[float]], step: list[float]
) -> list[dict[str, Any]]:
    """Divides the time of a step among its parts.

    Args:
      shape: of the step.
      seconds: of each of its `parts`, round by round.
      step: likewise, of the whole.
    """
    shares = {name: interleave.ratio(times, step) for name, times in seconds.items()}
    layer, attention = shares.pop("layer"), shares.pop("attention")
    rows = {
        "attention": shape.layers * attention,
        "feed-forward, layer norms": shape.layers * max(0.0, layer - attention),
        **shares,
    }
    rows["optimizer, and what is left"] = 1 - sum(rows.values())
    whole = 1e3 * statistics.median(step)
    return [
        {"part": name, "ms": share * whole, "share": share}
        for name, share in rows.items()
    ]


def without(shape: bench_shapes.Shape) -> dict[str, bench_shapes.Step]:
    """Returns optimization -> the bfloat16 step without it."""
    dtype, is_fine_tuning = "bfloat16", shape.what == FINE_TUNING.what
    make = fine_tuning if is_fine_tuning else masked_lm
    found = {
        "state written in place (donation)": make(shape, dtype, donates=False),
        "our attention, not jax.nn's": by_the_library(make(shape, dtype)),
    }
    if is_fine_tuning:
        longest = shape._replace(length=LONGEST_BUCKET)
        return found | {"rows as long as their bucket, not 96": make(longest, dtype)}
    return found | {
        "logits where masked, not everywhere": make(shape, dtype, mask_rate=1)
    }


def by_the_library(step: bench_shapes.Step) -> bench_shapes.Step:
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


def steps(shape: bench_shapes.Shape) -> dict[str, bench_shapes.Step]:
    """Returns name -> step: in both precisions, and PyTorch's if it is installed."""
    is_fine_tuning = shape.what == FINE_TUNING.what
    make, make_pytorch = (
        (fine_tuning, pytorch.fine_tuning)
        if is_fine_tuning
        else (masked_lm, pytorch.masked_lm)
    )
    found = {f"here, {dtype}": make(shape, dtype) for dtype in transformer.DTYPES}
    if pytorch.is_installed():
        found |= {
            f"PyTorch, {dtype}": make_pytorch(shape, dtype)
            for dtype in transformer.DTYPES
        }
    return found


def measure(shape: bench_shapes.Shape, rounds: int) -> dict[str, Any]:
    """Measures a shape's steps: rates, gains of the optimizations, profile."""
    named, optimizations = steps(shape), without(shape)
    pieces = parts(shape, "bfloat16")
    seconds = interleave.time_runs(named | optimizations | pieces, rounds, warm=WARM)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    whole = seconds["here, bfloat16"]

    def beside(name: str, dtype: str) -> float | None:
        other = seconds.get(f"PyTorch, {dtype}")
        return interleave.ratio(other, seconds[name]) if other else None

    return {
        "what": shape.what,
        "shape": shape._asdict(),
        "steps": [
            {
                "name": name,
                "ms": 1e3 * medians[name],
                "tokens_per_second": shape.tokens / medians[name],
                "over_pytorch": beside(name, "float32"),
                "over_same": beside(name, name.partition(", ")[2]),
            }
            for name in named
        ],
        "gains": [
            {
                "measure": name,
                "ms": 1e3 * medians[name],
                "times": interleave.ratio(seconds[name], whole),
            }
            for name in optimizations
        ],
        "profile": profile(shape, {name: seconds[name] for name in pieces}, whole),
    }


def targets(measured: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares what was measured with the targets."""
    found = []
    for each in measured:
        rates = {step["name"]: step["over_pytorch"] for step in each["steps"]}
        if rates["here, bfloat16"] is not None:
            found.append(
                {
                    "what": f"{each['what']}: tokens/s in bfloat16 over PyTorch's in"
                    " float32",
                    "value": rates["here, bfloat16"],
                    "at_least": PYTORCH_RATE,
                    "met": rates["here, bfloat16"] >= PYTORCH_RATE,
                }
            )
    return found


def main() -> int:
    """Measures, prints the tables, and writes --out."""
    begin = time.monotonic()
    is_small, rounds, out = (
        flags.FLAGS[name].value for name in ("small_shapes", "rounds", "out")
    )
    shapes = [FINE_TUNING, MLM, bert_levels.SHAPE]
    if is_small:
        shapes = [shape._replace(**SMALL) for shape in shapes]
    *shapes, of_bert = shapes
    measured = []
    for shape in shapes:
        process.message(f"{shape.what}: compiling, then {rounds} rounds")
        measured.append(measure(shape, rounds))
    seconds = interleave.time_runs(bert_levels.steps(of_bert), rounds, warm=WARM)
    result = {
        **report.provenance(time.monotonic() - begin),
        "rounds": rounds,
        "measured": measured,
        "bert": {
            "shape": of_bert._asdict(),
            "levels": bert_levels.figures(of_bert, seconds),
        },
        "targets": targets(measured),
    }
    report.show(bench_report.training(result))
    if out:
        report.write(pathlib.Path(out), result)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, DEFAULTS, names=["out"])
