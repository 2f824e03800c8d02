"""The step of BERT's pre-training, one optimization after another.

The order is that of "Multi-node Bert-pretraining: Cost-efficient Approach" (arXiv
2008.00177): what makes one device faster. Each level adds one field of `bert.Config`,
and follows the same loss curve as the level before.

B batch, L length.
"""

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.data import joined_rows
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.training import bert
from scripts.bench import interleave, shapes

SHAPE = shapes.Shape("BERT, padded rows", 4, 256, 4, 1024, 8_000, 64, 128)
START = {"dtype": "float32", "attention": "einsum", "logits": "all"}
LEVELS: Mapping[str, Mapping[str, Any]] = {
    "float32, logits everywhere, padded rows": {},
    "bfloat16 operands, float32 sums": {"dtype": "bfloat16"},
    "logits where masked": {"logits": "masked"},
    "fused attention": {"attention": "fused"},
    "joined rows": {"attention": "einsum", "layout": "joined", "joined_share": 0.625},
    "accumulation": {"micro_batches": 2},
}
"""Name -> fields that differ from the level before. Fused attention is no base for the
next level: it is faster on GPUs alone."""


def text(shape: shapes.Shape) -> np.ndarray:
    """Draws ids, [B, L] int32: about half of a row is padding, as in documents."""
    ids = shapes.tokens(shape)
    lengths = np.random.RandomState(1).randint(8, shape.length + 1, shape.batch)
    ids[np.arange(shape.length) >= lengths[:, None]] = vocabularies.SPECIAL.pad
    return ids


def steps(shape: shapes.Shape) -> dict[str, shapes.Step]:
    """Returns level -> its step, on one batch."""
    ids, fields, found = text(shape), dict(START), {}
    for name, more in LEVELS.items():
        fields |= more
        found[name] = _step(shape, fields, ids)
    return found


def _step(
    shape: shapes.Shape, fields: Mapping[str, Any], ids: np.ndarray
) -> shapes.Step:
    of_bert = {
        name: value
        for name, value in fields.items()
        if name not in ("dtype", "attention")
    }
    encoder = dataclasses.replace(
        shape.config(fields["dtype"]), attention=fields["attention"]
    )
    config = bert.Config(encoder, steps=1_000, all_reduce="each", **of_bert)
    state, frozen = bert.init(config, seed=0)
    inputs = [jnp.asarray(ids), jnp.zeros((), jnp.int32), jnp.zeros(())]
    if config.layout == "joined":
        lengths = joined_rows.lengths(ids, vocabularies.SPECIAL.pad)
        rows = config.rows(shape.batch, replicas=1)
        inputs.append(jnp.asarray(joined_rows.plan(lengths, shape.length, rows).where))
    step = jax.jit(functools.partial(bert.step, config), donate_argnums=0)

    def run() -> dict[str, jax.Array]:
        nonlocal state
        state, metrics = step(state, frozen, *inputs)
        return metrics

    return run


def figures(
    shape: shapes.Shape, seconds: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Returns the figures of each level.

    Args:
      shape: of model and batch.
      seconds: level -> seconds of a step, round by round.
    """
    tokens = int(np.sum(text(shape) != vocabularies.SPECIAL.pad))
    first, below, found = next(iter(LEVELS)), None, []
    for name in LEVELS:
        own = list(seconds[name])
        found.append(
            {
                "name": name,
                "ms": 1e3 * statistics.median(own),
                "tokens_per_second": tokens / statistics.median(own),
                "over_below": below and interleave.ratio(list(seconds[below]), own),
                "over_first": interleave.ratio(list(seconds[first]), own),
            }
        )
        below = below if name == "fused attention" else name
    return found
