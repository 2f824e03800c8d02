"""Short sequences that share a row: the places of their tokens, for rows with few pads.

A plan is made on the host from lengths alone; `training.bert` masks the batch as it is,
one sequence a row, and gathers what is masked into joined rows. So a token is masked
alike, joined or not. A batch is planned in groups, one for each device that gets a part
of it: no token has to leave its device.

B rows of a batch, one sequence each; R joined rows; L length; G groups.
"""

from typing import NamedTuple

import numpy as np

MOST = 4
"""Most sequences of a row. Each may have a masked token more than its share of the row,
so this bounds the slots that a row needs for them."""


class Plan(NamedTuple):
    """A plan of which tokens stand where.

    where: [R, L] int32, the place of a token among the B / G x L of its group, row by
      row; -1 where nothing stands.
    left_out: sequences that found no room.
    """

    where: np.ndarray
    left_out: int


def lengths(input_ids: np.ndarray, pad: int) -> np.ndarray:
    """Counts the tokens of each sequence, [B, L] int32 -> [B] int; pads are last."""
    return np.sum(input_ids != pad, axis=-1)


def plan(lengths: np.ndarray, max_length: int, rows: int, groups: int = 1) -> Plan:
    """Joins sequences, in order: each goes to the first row that has room for it.

    With R = B every sequence finds a row. With fewer, one that finds none is left out
    of the batch and counted: the shape stays, and so does the program. Groups are
    planned apart, so how many are left out depends on the number of devices.

    Args:
      lengths: [B] int, tokens of each sequence; one without a token needs no row.
      max_length: L; no sequence is longer.
      rows: R; G divides it.
      groups: G; divides B.

    Returns:
      Plan. Sequences of a row stand one after the other from its beginning.
    """
    parts = [
        _plan(each, max_length, rows // groups) for each in np.split(lengths, groups)
    ]
    where = np.concatenate([part.where for part in parts])
    return Plan(where, sum(part.left_out for part in parts))


def _plan(lengths: np.ndarray, max_length: int, rows: int) -> Plan:
    """Plans one group."""
    where = np.full((rows, max_length), -1, np.int32)
    used, joined = np.zeros(rows, int), np.zeros(rows, int)
    left_out = 0
    for number, length in enumerate(lengths):
        if not length:
            continue
        fits = (used + length <= max_length) & (joined < MOST)
        if not fits.any():
            left_out += 1
            continue
        row = int(np.argmax(fits))
        begin = used[row]
        first = number * max_length
        where[row, begin : begin + length] = np.arange(first, first + length)
        used[row] += length
        joined[row] += 1
    return Plan(where, left_out)
