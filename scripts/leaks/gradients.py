"""Attacks on gradients: the one in H^E that goes back, and those of local steps.

N training pairs, n attacked ones, L source length, Q target length, D width of PLM-S,
S pieces of the source's text, T of the target's, B rows of a batch.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nebula_jax.evaluation import leakage
from nebula_jax.models import pretrained, transformer
from nebula_jax.training import abnet as abnet_training
from scripts.leaks import victim as victims
from scripts.leaks.line import Line

PENALTY = 0.1  # of the probes: the best of powers of ten on own pairs of an attacker
FLATTENED, POOLED = "every position", "mean of positions"
X_ALONE = "X alone, its bag of pieces"
BOTH = "both"


def in_hidden(victim: victims.Victim, params: Any, hidden: np.ndarray) -> np.ndarray:
    """Computes the gradient in H^E as the target cluster does, for all pairs.

    Args:
      victim: whose target side it is.
      params: of the target side.
      hidden: [N, L, D] float32, H^E.

    Returns:
      [N, L, D] float32.
    """
    agreed, task = victim.run.agreed, victim.both.halves[1].task
    rows, columns = agreed.batch_size // agreed.micro_batches, victim.targets.shape[1]
    lengths = victim.both.texts[1].train.lengths
    tokens = np.float32(lengths.mean() * agreed.batch_size)
    slots = np.zeros(rows * columns, np.int8)

    @jax.jit
    def differentiate(
        params: Any, hidden: jax.Array, mask: jax.Array, targets: jax.Array, at: Any
    ) -> jax.Array:
        batch = abnet_training.TargetBatch(targets, at, tokens, slots)

        def loss(hidden: jax.Array) -> jax.Array:
            received = {"hidden": hidden, "mask": mask, "index": at}
            key = jax.random.key(agreed.seed)
            return abnet_training.back(task, params, received, batch, key)[0]

        return jax.grad(loss)(hidden)

    found = np.zeros_like(hidden)
    for start in range(0, len(hidden), rows):
        at = np.arange(start, start + rows, dtype=np.int32) % len(hidden)
        arrays = (each[at] for each in (hidden, victim.rows.mask, victim.targets))
        new = jax.device_get(differentiate(params, *arrays, at))
        part = found[start : start + rows]
        part[:] = new[: len(part)]
    return found


def bags(numbers: np.ndarray, size: int) -> np.ndarray:
    """Marks the pieces of each row.

    Args:
      numbers: [N, L] int32, of pieces; NO_PIECE where there is none.
      size: of the set of pieces.

    Returns:
      [N, size] bool.
    """
    found = np.zeros((len(numbers), size), bool)
    row, column = np.nonzero(numbers != victims.NO_PIECE)
    found[row, numbers[row, column]] = True
    return found


class Features(NamedTuple):
    """An array that a probe reads, and the name of what it is made of.

    what: that it is made of.
    codec: through which it came; empty if it did not cross.
    values: [N, F] float32.
    """

    what: str
    codec: str
    values: np.ndarray


def features(
    victim: victims.Victim, hidden: np.ndarray, lines: Mapping[str, Line]
) -> list[Features]:
    """Makes the features of all probes.

    Args:
      victim: whose target side computes the gradient.
      hidden: [N, L, D] float32, H^E.
      lines: backward codec -> its channel. The first one is compared in other ways too.
    """
    mask = victim.rows.mask
    gradient = in_hidden(victim, victim.params[1], hidden)
    of_x = bags(victim.rows.pieces, len(victim.rows.candidates)).astype(np.float32)
    of_x = _units(of_x)
    found = [Features(X_ALONE, "", of_x)]
    for codec, line in lines.items():
        received = line.send(gradient, mask).arrays * mask[..., None]
        flat = _units(received.reshape(len(received), -1))
        if len(found) == 1:
            pooled = _units(received.sum(axis=1))
            found.append(Features(POOLED, codec, pooled))
            both = np.concatenate([of_x, flat], axis=1)
            found.append(Features(BOTH, codec, both))
        found.append(Features(FLATTENED, codec, flat))
    return found


def _units(rows: np.ndarray) -> np.ndarray:
    """Scales each row to length 1; the size of a loss is no part of its text."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.maximum(norms, leakage.TINY)


def probe(
    found: Sequence[Features], present: np.ndarray, sides: Sequence[victims.Sides]
) -> list[dict[str, Any]]:
    """Predicts which pieces the target sentence has, for each kind of features.

    Args:
      found: from `features`.
      present: [N, T] bool, the pieces of the target sentences.
      sides: of each attacker. Those of its own are pairs whose Y it has.

    Returns:
      what, codec, and for each attacker average_precision and recovered; the first row
      is a guess by frequency.
    """
    rows = []
    guesses = [
        np.broadcast_to(present[each.own].mean(axis=0), present[each.attacked].shape)
        for each in sides
    ]
    rows.append(_row("most frequent pieces", "", guesses, present, sides))
    for each in found:
        scores = [
            jax.device_get(
                leakage.probe(
                    each.values[side.own],
                    present[side.own].astype(np.float32),
                    each.values[side.attacked],
                    PENALTY,
                )
            )
            for side in sides
        ]
        rows.append(_row(each.what, each.codec, scores, present, sides))
    return rows


def _row(
    what: str,
    codec: str,
    scores: Sequence[np.ndarray],
    present: np.ndarray,
    sides: Sequence[victims.Sides],
) -> dict[str, Any]:
    found = [
        leakage.bag_recovery(each, present[side.attacked])
        for each, side in zip(scores, sides, strict=True)
    ]
    return {
        "what": what,
        "codec": codec,
        "average_precision": [each.average_precision for each in found],
        "recovered": [each.recovered for each in found],
    }


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
