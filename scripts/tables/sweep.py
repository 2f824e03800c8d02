"""A table as data: its runs are rows of flags, and its Markdown is columns.

A sweep does the runs that have not been done, one after the other, and makes a record
of their figures; `make_tables` renders the record again, by the same columns.
"""

import json
import pathlib
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax.runtime.records import report, run_folder
from scripts.tables import config
from scripts.tables import runs as table_runs

Record = Mapping[str, Any]
PAPER: dict[str, Any] = json.loads(  # the figures of the paper's tables
    (pathlib.Path(__file__).parent / "paper.json").read_text()
)


class Column(NamedTuple):
    """A column of a table."""

    name: str
    read: str | Callable[[Any], Any]
    """How a row of the record is read: its keys, as in `bytes.forward`, or a function.
    A text is a cell as it is; numbers are formatted, several with commas between."""
    form: str = ""  # format of a number, such as .2f

    def cell(self, row: Any) -> str:
        """Renders the cell of a row."""
        value = row
        if isinstance(self.read, str):
            for key in self.read.split("."):
                value = value[key]
        else:
            value = self.read(row)
        if isinstance(value, str):
            return value
        numbers = value if isinstance(value, list) else [value]
        return ", ".join(report.figure(each, self.form) for each in numbers)


def table(columns: Sequence[Column], rows: Iterable[Any], alignment: str = "") -> str:
    """Renders rows of a record; empty if there are none."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    names = [column.name for column in columns]
    return report.table(names, cells, alignment) if cells else ""


def spread(by_seed: Collection[float], form: str, of_mean: bool = False) -> str:
    """Renders a mean over seeds with the standard deviation; empty without a seed.

    `form` is the mean's, such as +.2f; `of_mean` is for its standard error instead.
    """
    if not by_seed:
        return ""
    if len(by_seed) == 1:
        return f"{statistics.fmean(by_seed):{form}}"
    error = standard_error(by_seed) if of_mean else statistics.stdev(by_seed)
    return mean_and_error(statistics.fmean(by_seed), error, form)


def standard_error(by_seed: Collection[float]) -> float:
    """Returns the standard error of a mean over seeds, at least two."""
    return statistics.stdev(by_seed) / len(by_seed) ** 0.5


def mean_and_error(mean: float, error: float, form: str) -> str:
    """Renders a mean with its error; the error has no sign.

    >>> mean_and_error(0.0238, 0.0043, "+.1%")
    '+2.4% ± 0.4%'
    """
    return f"{mean:{form}} ± {error:{form.lstrip('+')}}"


class Sweep(NamedTuple):
    """A table's runs, and what is made of them."""

    name: str  # the record's, without its scale
    record: Callable[[table_runs.Runs, config.Table], dict[str, Any]]
    """Does the missing runs and returns the record, but for its provenance."""
    markdown: Callable[[Record], str]
    figures: table_runs.Figures = table_runs.summary_of
    execute: table_runs.Execute = table_runs.start
    draw: Callable[[Record, pathlib.Path], None] | None = None
    """Draws the record's pictures beside its file."""
    scales: Sequence[str] = ()  # see `config.from_flags`
    seeds: int = 3  # by default
    needs_text: bool = True

    def run(self) -> int:
        """Makes the table as the flags have it; writes, draws and prints it."""
        table = config.from_flags(self.name, self.scales, self.seeds, self.needs_text)
        with run_folder.lock(table.workdir):
            runs = table_runs.Runs(
                table.workdir, self.figures, self.execute, results=table.results
            )
            found = self.record(runs, table)
            # After the runs: it counts all that were read.
            record = runs.provenance(table.seeds) | found
            # In the lock, and first: a folder with nothing in it goes with the lock.
            table_runs.write(record, self.markdown(record), table.out)
            if self.draw is not None:
                self.draw(record, table.out)
        return 0
