"""How fast a step trains here, beside PyTorch's, where time goes, what gained how much.

    python -m scripts.bench_training                        # a table, in some minutes
    python -m scripts.bench_training --out=training.json    # and all of it as JSON

PyTorch's steps need what is in requirements-parity.txt; without it ours run alone. All
run in turn, round by round, in one process, with a thread for each core, on random
weights and text: a rate is that of the median step, a ratio the median of the rounds'
ratios. The second step of each turn is timed: the first one after another library's is
slower, presumably because its memory is gone. bfloat16 is PyTorch's autocast, and here
operands of matrix products. What each measure for speed gains is seen by doing that
step without it.

B batch, L length.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import flags

from experiments import lifecycle, run_report, shared_flags
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import classifier, electra, transformer
from nebula_jax.training import (
    classification,
    cut,
    losses,
    m3,
    masking,
    optimizers,
    sampling,
)
from nebula_jax.training import state as train_state
from scripts.bench import interleave, pytorch
from scripts.bench import shapes as bench_shapes
from scripts.out import OUT

flags.declare_key_flag("out")
ROUNDS = flags.DEFINE_integer("training_rounds", 7, "Rounds of all.", lower_bound=1)
SMALL_SHAPES = flags.DEFINE_bool("small_shapes", False, "Tiny shapes, to try it out.")

WARM = 1  # steps in each turn before the one that is timed
LONGEST_BUCKET = 96  # tokens, of xnli_warm.flags
THEIR_RATE = 1.0  # ours over PyTorch's in float32, at least


FINE_TUNING = bench_shapes.Shape(
    "fine-tuning, embeddings frozen", 12, 384, 12, 1536, 60_000, 32, 48
)
MLM = bench_shapes.Shape(
    "masked LM, logits where masked", 6, 384, 12, 1536, 30_522, 16, 128
)
SMALL = {"layers": 1, "width": 32, "heads": 2, "feed_forward": 64, "vocab_size": 100}


def _adam():
    return optimizers.adam(lambda step: bench_shapes.RATE, clip_norm=1.0)


def _kept(step: Callable[[Any], tuple[Any, Any]], state: Any) -> bench_shapes.Step:
    """A step that remembers its state."""

    def run():
        nonlocal state
        state, metrics = step(state)
        return state, metrics

    return run


def fine_tuning(
    shape: bench_shapes.Shape, dtype: str, *, donates: bool = True
) -> bench_shapes.Step:
    """`finetune_xnli`'s step; `donates`: whether its state is written in place."""
    config = classifier.Config(
        encoder=shape.config(dtype),
        special=vocabularies.SPECIAL,
        dropout=0.0,
    )
    ids = jnp.asarray(bench_shapes.tokens(shape))
    own = electra.Generator(config.encoder).init(
        jax.random.key(0), ids[:1], ids[:1] > 0, ids[:1, :1]
    )["params"]
    head = classifier.Head(config).init(
        jax.random.key(1), jnp.zeros((1, shape.width)), True
    )["params"]
    params = {name: own[name] for name in ("embeddings", "encoder")}
    params["classifier"] = head
    trained, frozen = cut.split(params, classification.is_trained)
    optimizer = _adam()
    state = train_state.create(trained, optimizer, jax.random.key(2))
    step = jax.jit(
        functools.partial(classification.step, config, optimizer),
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
    """An M3 generator's step; `donates` as in `fine_tuning`."""
    config = m3.Config(
        generator=shape.config(dtype),
        discriminator=shape.config(dtype),
        steps=10_000,
        mask_rate=mask_rate,
        learning_rate=bench_shapes.RATE,
    )
    state = m3.init_generator(config, 0, 0)
    step = jax.jit(
        functools.partial(m3.generator_step, config),
        donate_argnums=0 if donates else (),
    )
    ids = jnp.asarray(bench_shapes.tokens(shape))

    def take(state):
        state, _, metrics = step(state, ids)
        return state, metrics

    return _kept(take, state)


def parts(shape: bench_shapes.Shape, dtype: str) -> dict[str, bench_shapes.Step]:
    """What a step is made of, forward and backward, each jitted by itself.

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
        """Of the sum, in all floating-point arguments."""
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

    def init(module, *arguments):
        return module.init(jax.random.key(1), *arguments)["params"]

    found = {
        "attention": gradient(
            lambda params, h: attention.apply({"params": params}, h, mask, True),
            init(attention, hidden, mask, True),
            hidden,
        ),
        "layer": gradient(
            lambda params, h: block.apply({"params": params}, h, mask, True),
            init(block, hidden, mask, True),
            hidden,
        ),
    }
    if shape.what == FINE_TUNING.what:
        table = init(embeddings, ids, True)
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
        "embeddings and head": gradient(head, init(generator, ids, mask, positions)),
        "sampling": lambda: sample(logits),
    }


def profile(
    shape: bench_shapes.Shape, seconds: Mapping[str, list[float]], step: list[float]
) -> list[dict[str, Any]]:
    """Where the time of a step goes.

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
    """Measure for speed -> the bfloat16 step without it."""
    dtype, is_fine_tuning = "bfloat16", shape.what == FINE_TUNING.what
    own = fine_tuning if is_fine_tuning else masked_lm
    found = {
        "state written in place (donation)": own(shape, dtype, donates=False),
        "our attention, not jax.nn's": by_the_library(own(shape, dtype)),
    }
    if is_fine_tuning:
        longest = shape._replace(length=LONGEST_BUCKET)
        return found | {"rows as long as their bucket, not 96": own(longest, dtype)}
    return found | {
        "logits where masked, not everywhere": own(shape, dtype, mask_rate=1)
    }


def by_the_library(step: bench_shapes.Step) -> bench_shapes.Step:
    """The step, if jax.nn.dot_product_attention is in our attention's place."""

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
    """Name -> step: ours in both precisions, and PyTorch's if it is here."""
    is_fine_tuning = shape.what == FINE_TUNING.what
    ours, theirs = (
        (fine_tuning, pytorch.fine_tuning)
        if is_fine_tuning
        else (masked_lm, pytorch.masked_lm)
    )
    found = {f"here, {dtype}": ours(shape, dtype) for dtype in transformer.DTYPES}
    if pytorch.is_here():
        found |= {
            f"PyTorch, {dtype}": theirs(shape, dtype) for dtype in transformer.DTYPES
        }
    return found


def measure(shape: bench_shapes.Shape, rounds: int) -> dict[str, Any]:
    """Rates of a shape's steps, what our measures gain, and where our time goes."""
    named, measures, own = steps(shape), without(shape), parts(shape, "bfloat16")
    seconds = interleave.race(named | measures | own, rounds, warm=WARM)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ours = seconds["here, bfloat16"]

    def beside(name: str, dtype: str) -> float | None:
        theirs = seconds.get(f"PyTorch, {dtype}")
        return interleave.ratio(theirs, seconds[name]) if theirs else None

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
                "times": interleave.ratio(seconds[name], ours),
            }
            for name in measures
        ],
        "profile": profile(shape, {name: seconds[name] for name in own}, ours),
    }


def targets(measured: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, and what was."""
    found = []
    for each in measured:
        rates = {step["name"]: step["over_pytorch"] for step in each["steps"]}
        if rates["here, bfloat16"] is not None:
            found.append(
                {
                    "what": f"{each['what']}: tokens/s in bfloat16 over PyTorch's in"
                    " float32",
                    "value": rates["here, bfloat16"],
                    "at_least": THEIR_RATE,
                    "met": rates["here, bfloat16"] >= THEIR_RATE,
                }
            )
    return found


def main() -> int:
    """Measures, prints, and writes --out."""
    begin = time.monotonic()
    shapes = [FINE_TUNING, MLM]
    if SMALL_SHAPES.value:
        shapes = [shape._replace(**SMALL) for shape in shapes]
    measured = []
    for shape in shapes:
        lifecycle.say(f"{shape.what}: compiling, then {ROUNDS.value} rounds")
        measured.append(measure(shape, ROUNDS.value))
        for step in measured[-1]["steps"]:
            beside = ""
            if step["over_pytorch"] is not None:
                beside = (
                    f"  {step['over_pytorch']:.2f} of PyTorch's in float32,"
                    f" {step['over_same']:.2f} of its in the same"
                )
            print(
                f"{step['name']:20} {step['ms']:8.0f} ms"
                f" {step['tokens_per_second']:8,.0f} tokens/s{beside}"
            )
        for gain in measured[-1]["gains"]:
            print(f"  without: {gain['measure']:40} x {gain['times']:.2f}")
        for row in measured[-1]["profile"]:
            print(f"  {row['part']:30} {row['ms']:8.0f} ms {row['share']:6.0%}")
    result = {
        "command": shared_flags.command(),
        "commit": shared_flags.commit(),
        "hardware": run_report.hardware(),
        "rounds": ROUNDS.value,
        "seconds": round(time.monotonic() - begin, 1),
        "measured": measured,
        "targets": targets(measured),
    }
    for each in result["targets"]:
        print(f"{'met    ' if each['met'] else 'NOT met'} {each['what']}")
    if OUT.value:
        pathlib.Path(OUT.value).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
