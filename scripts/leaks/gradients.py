"""The attack on gradients that local steps send: the span test.

L source length, D width of PLM-S, B rows of a batch.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nebula_jax.evaluation import leakage
from nebula_jax.models import pretrained, transformer
from scripts.leaks import victim as victims


def of_query(
    model: pretrained.Pretrained, rows: victims.Rows, chosen: np.ndarray
) -> np.ndarray:
    """Computes the gradient of the first layer's query projection, as a local step has.

    The loss is the cross-entropy of every token, predicted from the last hidden states
    by the public table: any loss gives a gradient with the same span.

    Args:
      model: PLM-S, computed in float32: products of bfloat16 have rounded inputs, and
        then whoever tests must round likewise.
      rows: of the source side.
      chosen: [B] int, the batch.

    Returns:
      [D, D] float32.
    """
    table = model.params["embeddings"]["word_embeddings"]["embedding"]
    gradient = _query_gradient(
        dataclasses.replace(model.config, dtype="float32", dropout=0.0),
        {part: model.params[part] for part in ("embeddings", "encoder")},
        table[rows.candidates],
        *(each[chosen] for each in (rows.ids, rows.mask, rows.pieces)),
    )
    return jax.device_get(gradient).reshape(model.config.width, -1)


@functools.partial(jax.jit, static_argnums=0)
def _query_gradient(
    shape: transformer.Config,
    params: Any,
    table: jax.Array,
    ids: jax.Array,
    mask: jax.Array,
    pieces: jax.Array,
) -> jax.Array:
    first = params["encoder"]["layer_0"]

    def loss(kernel: jax.Array) -> jax.Array:
        query = first["attention"]["query"] | {"kernel": kernel}
        layer = first | {"attention": first["attention"] | {"query": query}}
        hidden = transformer.Embeddings(shape).apply(
            {"params": params["embeddings"]}, ids, True
        )
        hidden = transformer.Encoder(shape).apply(
            {"params": params["encoder"] | {"layer_0": layer}}, hidden, mask, True
        )
        logits = jnp.einsum("bld,vd->blv", hidden, table)
        is_text = pieces != victims.NO_PIECE
        of_each = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.maximum(pieces, 0)
        )
        return jnp.sum(of_each * is_text) / jnp.sum(is_text)

    return jax.grad(loss)(first["attention"]["query"]["kernel"])


def span(
    model: pretrained.Pretrained,
    rows: victims.Rows,
    tables: victims.Tables,
    sizes: Sequence[int],
    sides: Mapping[int, victims.Sides],
) -> list[dict[str, Any]]:
    """Applies the span test to batches of growing size.

    Args:
      model: PLM-S, with as many layers as the run uses.
      rows: of the source side.
      tables: of its candidates.
      sizes: B of each batch, at most the number of attacked rows.
      sides: seed -> rows that are attacked, of which a batch has the first.

    Returns:
      For each size: rows, positions (B L), width, and a list for each figure of
      `leakage.Span`.
    """
    places = np.arange(rows.ids.shape[1])
    found = []
    for size in sizes:
        scores = []
        for side in sides.values():
            chosen = side.attacked[:size]
            present = np.zeros(tables.by_position.shape[:2], bool)
            pieces = rows.pieces[chosen]
            for position in places:
                here = pieces[:, position]
                present[position, here[here != victims.NO_PIECE]] = True
            gradient = of_query(model, rows, chosen)
            scores.append(leakage.span_test(gradient, tables.by_position, present))
        found.append(
            {
                "rows": size,
                "positions": size * len(places),
                "width": model.config.width,
                **{
                    name: [getattr(each, name) for each in scores]
                    for name in leakage.Span._fields
                },
            }
        )
    return found
