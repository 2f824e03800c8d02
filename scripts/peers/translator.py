"""The task of the cut: an encoder-decoder in two parts, of Table 5's size.

Layers, widths, lengths and batches are those of its tiny scale, with attention to the
source in place of adapters. The source reads twelve bytes of text, the target writes
them from the last to the first. All weights begin random and train; a step is a round.
The model is written once, over the operations that each framework gives.

B batch, L length, D width, H heads, K head width, V symbols.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from scripts.peers import task as task_lib

LENGTH, WIDTH, HEADS, INNER = 12, 384, 12, 1536
LAYERS = {"source": 3, "target": 2}
MICRO_BATCHES = 16
LAST_STEPS = 5  # whose mean is the loss of a trial
BEGIN = 0  # the symbol before a target sentence; no text has it


class Operations(NamedTuple):
    """A framework's own operations."""

    gelu: Callable[..., Any]
    normal: Callable[..., Any]  # a layer norm of x [B, L, D], without parameters
    attend: Callable[..., Any]  # of query, key, value [B, L, H, K], maybe `is_causal`


def parameters(part: str) -> dict[str, np.ndarray]:
    """Returns those of step 0 of a part, float32: weights [in, out] and biases."""
    tables = {"words": (task_lib.SYMBOLS, WIDTH), "places": (LENGTH, WIDTH)}
    layers = {"head": (WIDTH, task_lib.SYMBOLS)} if part == "target" else {}
    for layer in range(LAYERS[part]):
        for kind in ("own", "other") if part == "target" else ("own",):
            for name in ("query", "key", "value", "output"):
                layers[f"{kind}_{name}_{layer}"] = (WIDTH, WIDTH)
        layers |= {f"inner_{layer}": (WIDTH, INNER), f"outer_{layer}": (INNER, WIDTH)}
    return task_lib.drawn(LAYERS[part], tables, layers)


def hidden(
    ops: Operations, params: Mapping[str, Any], ids: Any, source: Any = None
) -> Any:
    """Computes the hidden states of a part, post-layer-norm, [B, L, D].

    `ids` are [B, L] integers; the target has the hidden states of the `source` too.
    """

    def dense(name: str, x: Any) -> Any:
        return x @ params[name] + params[f"{name}_bias"]

    def attended(kind: str, layer: int, x: Any, memory: Any, is_causal: bool) -> Any:
        heads = [
            dense(f"{kind}_{name}_{layer}", each).reshape(*each.shape[:2], HEADS, -1)
            for name, each in (("query", x), ("key", memory), ("value", memory))
        ]
        context = ops.attend(*heads, is_causal=is_causal).reshape(x.shape)
        return ops.normal(x + dense(f"{kind}_output_{layer}", context))

    x = ops.normal(params["words"][ids] + params["places"])
    is_target = source is not None
    for layer in range(LAYERS["target" if is_target else "source"]):
        x = attended("own", layer, x, x, is_target)
        if is_target:
            x = attended("other", layer, x, source, False)
        inner = ops.gelu(dense(f"inner_{layer}", x))
        x = ops.normal(x + dense(f"outer_{layer}", inner))
    return x


def logits(ops: Operations, params: Mapping[str, Any], given: Any, source: Any) -> Any:
    """Computes the target's logits behind each symbol that is given, [B, L, V]."""
    x = hidden(ops, params, given, source)
    return x @ params["head"] + params["head_bias"]


class Batch(NamedTuple):
    """The rows of a step, [B, L] int32 each."""

    source: np.ndarray
    given: np.ndarray  # what the target has read where it guesses
    wanted: np.ndarray  # what it should guess


def batch(task: task_lib.Task, step: int) -> Batch:
    """Returns the batch of a step, from 1, which is the same for both parts."""
    source = dataclasses.replace(task, worker=0).rows(step)[:, :LENGTH]
    wanted = np.ascontiguousarray(source[:, ::-1])
    given = np.pad(wanted[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN)
    return Batch(source, given, wanted)


def loss(losses: list[float]) -> float | None:
    """Returns the loss of a trial, in nats, from that of each step; None of none."""
    return float(np.mean(losses[-LAST_STEPS:])) if losses else None
