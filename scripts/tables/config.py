"""The configuration of a table: its flags, and the values that are passed on."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Sequence

from absl import flags

from nebula_jax import errors, installed

flags.DEFINE_string(
    "scale", "", "Size of the runs; a table names its sizes in an error at any other."
)
flags.DEFINE_string(
    "seeds",
    "",
    "Seeds that each row is the mean of: their number, or a list such as 0,1,2 (`5,` is"
    " the seed 5 alone).",
)
flags.DEFINE_string(
    "results_dir",
    "",
    "Folder of the figures of finished runs, which are not done again; results/ of"
    " --workdir if empty. With it a table may go on on another machine: in the same"
    " working directory, with the same --data_dir, --prepared_dir, --pretrained_dir and"
    " --workdir, since paths are among the arguments that are compared.",
)

FLAGS = (  # of a table; one with sizes has --scale as well
    "seeds",
    "out",
    "data_dir",
    "workdir",
    "results_dir",
    "pretrained_dir",
    "prepared_dir",
)
FOLDER = installed.FOLDER / "experiments"
RESULTS = pathlib.Path() if installed.IS_WHEEL else FOLDER / "results"
"""The folder of records: a checkout's, else the working directory."""
BESIDE = FOLDER.parents[1] / "shared" / "data"
MOST_SEEDS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The configuration of one table."""

    name: str  # such as table5_tiny
    scale: str  # size of the runs; empty if there is one only
    seeds: tuple[str, ...]
    workdir: pathlib.Path
    results: pathlib.Path
    out: pathlib.Path
    data_dir: str  # a text folder
    prepared_dir: str
    pretrained_dir: str

    def arguments(self, flagfile: pathlib.Path) -> tuple[str, ...]:
        """Returns the flags that all runs of a flagfile begin with."""
        return (
            f"--flagfile={flagfile}",
            f"--data_dir={self.data_dir}",
            f"--pretrained_dir={self.pretrained_dir}",
            f"--prepared_dir={self.prepared_dir}",
        )


def from_flags(
    name: str,
    scales: Sequence[str] = (),
    seeds: int = 1,
    needs_text: bool = True,
) -> Table:
    """Returns the flags as values, for `main`; SettingsError at what cannot work.

    `name` is the table's, without its scale. The first of `scales` is the default; the
    last of several shows in minutes how the table is made: it has one seed by default,
    and its record in --workdir, since it measures nothing. `seeds` is their default
    number; `needs_text` is True if the runs need --data_dir.
    """
    given = {flag: flags.FLAGS[flag].value for flag in ("scale", *FLAGS)}
    size = scale(given["scale"], scales) if scales else ""
    name = f"{name}_{size}" if size else name
    workdir = pathlib.Path(given["workdir"] or f"runs/{name}")
    is_smallest = len(scales) > 1 and size == scales[-1]
    records = workdir if is_smallest else RESULTS
    return Table(
        name=name,
        scale=size,
        seeds=seed_list(given["seeds"], 1 if is_smallest else seeds),
        workdir=workdir,
        results=pathlib.Path(given["results_dir"] or workdir / "results"),
        out=pathlib.Path(given["out"] or records / f"{name}.json"),
        data_dir=data_dir(given["data_dir"]) if needs_text else "",
        prepared_dir=given["prepared_dir"],
        pretrained_dir=given["pretrained_dir"],
    )


def scale(given: str, known: Sequence[str]) -> str:
    """Returns --scale, by default the first that is known; another is an error."""
    if given and given not in known:
        there = ", ".join(filter(None, known))
        raise errors.SettingsError(f"--scale={given}: there is {there} here")
    return given or known[0]


def seed_list(given: str, count: int) -> tuple[str, ...]:
    """Returns --seeds, by default 0 to `count` - 1; another form is an error."""
    given = given or str(count)
    parts = [part.strip() for part in given.split(",")]
    if parts[1:] and not parts[-1]:  # `5,` is the seed 5
        del parts[-1]
    if not all(re.fullmatch("[0-9]{1,10}", part) for part in parts):
        raise errors.SettingsError(
            f"--seeds={given}: expected a number of seeds, or seeds such as 0,1,2"
        )
    seeds = [int(part) for part in parts] if "," in given else range(int(given))
    if not 1 <= len(seeds) <= MOST_SEEDS or len(set(seeds)) != len(seeds):
        raise errors.SettingsError(
            f"--seeds={given}: expected 1 to {MOST_SEEDS} seeds, each once; a comma"
            " makes a list (`0,` is the seed 0 alone)"
        )
    return tuple(map(str, seeds))


def data_dir(given: str) -> str:
    """Returns --data_dir; if it is not given, `shared/data` beside the repository."""
    if not given.startswith("package:"):
        return given
    if BESIDE.is_dir():
        return os.path.relpath(BESIDE)
    raise errors.SettingsError(
        "--data_dir is missing: a text folder (see experiments/m3/README.md) with"
        f" translations and sentence pairs, of which {given} has none"
    )
