"""The task of the cut: an encoder-decoder in two parts, of the shape of Table 5's.

The source reads twelve bytes of text, the target writes them from the last to the
first. Both have random weights, all of which train; a step is a round. Here is what
both frameworks share, in NumPy.
"""

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np

from scripts.peers import task as task_lib

LENGTH = 12  # of both sides, as in Table 5 at its tiny scale; so are the sizes below
WIDTH, HEADS, FEED_FORWARD = 384, 12, 1536
SOURCE_LAYERS, TARGET_LAYERS = 3, 2
ENCODER_INNER, DECODER_INNER, DECODER_HEADS = 256, 512, 4
MICRO_BATCHES = 16
LAST_STEPS = 5  # whose mean is the loss of a trial
BEGIN = 0  # the symbol before a target sentence; no text has it


class Batch(NamedTuple):
    """The rows of a step.

    source: [B, LENGTH] int32. given: [B, LENGTH] int32, what the target has read where
      it guesses. wanted: [B, LENGTH] int32, what it should guess.
    """

    source: np.ndarray
    given: np.ndarray
    wanted: np.ndarray


def batch(task: task_lib.Task, step: int) -> Batch:
    """Returns the batch of a step, from 1, which is the same for both parts."""
    source = dataclasses.replace(task, worker=0).rows(step)[:, :LENGTH]
    wanted = np.ascontiguousarray(source[:, ::-1])
    given = np.pad(wanted[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN)
    return Batch(source, given, wanted)


def parameters(task: task_lib.Task, part: str) -> dict[str, np.ndarray]:
    """Returns path -> values at step 0 of a part, `source` or `target`."""
    with np.load(pathlib.Path(task.folder, "parameters.npz")) as found:
        names = [name for name in found if name.startswith(f"{part}/")]
        return {name.removeprefix(f"{part}/"): found[name] for name in names}


def loss(losses: list[float]) -> float:
    """Returns the loss of a trial, in nats, from that of each step."""
    return float(np.mean(losses[-LAST_STEPS:]))
