"""Clock readings on which decisions depend, kept in a file of the cluster's folder.

A run that goes on takes them from there instead of measuring again, and so comes to the
same parameters. A run that begins anew does not: the line of an attempt that saved
nothing else may have been another.
"""

import contextlib
import json
import pathlib
from collections.abc import Sequence

from nebula_jax.communication import ranks

ANEW: list[float] = []
"""The row that is written where a run begins anew; those above it do not count."""


class Readings:
    """The readings of a run, by the number of a step or of a round.

    The file has a JSON row for each: the number first, the reading last.
    """

    def __init__(self, path: pathlib.Path | None) -> None:
        """Begins without readings.

        Args:
          path: of the file; None if nothing is to be kept.
        """
        self._path = path
        self._kept: dict[int, float] = {}

    def resume(self, is_new: bool) -> None:
        """Takes the readings of the file.

        Args:
          is_new: True if the run begins anew, without a checkpoint.
        """
        if self._path is None or not self._path.is_file():
            return
        if is_new:
            self._append(ANEW)
            return
        for line in self._path.read_text().splitlines():
            # A process that is killed may leave half a line.
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if row == ANEW:
                    self._kept.clear()
                    continue
                number, *_, reading = row
                self._kept[int(number)] = float(reading)

    def of(self, number: int, measured: float) -> float:
        """Returns the reading that was kept, else the one that was measured now."""
        return self._kept.get(number, measured)

    def write(self, row: Sequence[float]) -> None:
        """Keeps a reading: its number first, itself last. A kept one stays."""
        if int(row[0]) not in self._kept and self._path is not None:
            self._append(row)

    def _append(self, row: Sequence[float]) -> None:
        assert self._path is not None
        if ranks.is_root():
            with self._path.open("a") as file:
                file.write(f"\n{json.dumps(list(row))}\n")
