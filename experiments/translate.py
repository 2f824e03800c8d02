"""Translates lines with a trained ABNet: both of its sides here, or one at each site.

    python -m experiments.translate --run=runs/abnet_es_en < spanish.txt > english.txt

A line of input is a sentence, and gives a line of output; at a terminal, or of a pipe,
as soon as it comes. A file is read first, and translated some hundred lines at a time:
a stop keeps what is written. `--run` is the folder of a run that trained both sides
here. The flags of the run hold; --beams and --iterations may be given. Where the sides
are of two sites, each with its own part of the run's folder:

    ... --run=RUN --cluster=target --listen=0.0.0.0:7070 --tls=credentials/target
    ... --run=RUN --cluster=source --peer=HOST:7070 --tls=credentials/source

The first waits for the second, which reads sentences and writes their translations:
hidden states cross, through the run's forward codec, and words come back. In a notebook
there are no flags:

    from experiments.abnet import translator
    translator.Translator("runs/abnet_es_en").translate(["una casa", "dos puertas"])
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence

from experiments import configuration, shared_flags
from experiments.abnet import config, translator, two_sites
from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.data import tsv
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process

HERE = ("--cluster=all", "--coordinator=", "--processes_per_cluster=1", "--restart=0")
"""Flags in the place of the run's, whose processes are not those of this command."""

# Lines of a file translated at once: sorted by length, many have little padding.
PART = 4 * translator.BATCH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The settings that no run keeps: they choose what this command does."""

    run: str
    cluster: str
    # Those of the run that may be replaced.
    beams: int
    iterations: int
    pretrained_dir: pathlib.Path


FLAGS = [*fields.define(Command), *fields.names(connect.Settings)]


@process.sigterm_as_exit()  # so that the other site hears of it
def main() -> int:
    """Translates standard input, or serves the site that does."""
    command = fields.read(Command)
    configuration.parse_run(command.run, "train_abnet", HERE)
    run = config.from_flags()
    config.check_beams(run.agreed)
    cluster = run.local.cluster
    if cluster not in ("all", *config.CLUSTERS):
        raise errors.SettingsError(
            f"--cluster={cluster}: expected all, source or target"
        )
    if cluster != "all":
        all_clusters.check_place(run.local.connection(), cluster, config.CLUSTERS)
    if cluster == "target":
        two_sites.serve(run)
        return 0
    given: Iterator[tuple[int, str]] = (
        (number, line.strip())
        for number, line in tsv.lines(pathlib.Path("standard input"), sys.stdin.buffer)
    )
    rows = size = 1
    if sys.stdin.isatty():
        process.message("a line is a sentence; Ctrl-D ends")
    elif sys.stdin.seekable():  # a file: what is wrong with it is found before all else
        whole = list(given)
        given, rows, size = iter(whole), translator.rows_of(whole), PART
    parts = iter(lambda: list(itertools.islice(given, size)), [])
    if cluster == "source":
        two_sites.translate(run, rows, parts, _write)
    else:
        _translate_here(run, rows, parts)
    return 0


def _translate_here(
    run: config.Run, rows: int, parts: Iterator[Sequence[tuple[int, str]]]
) -> None:
    both = None
    for part in parts:  # of nothing, no model is read
        both = both or translator.Translator(run)
        _write(both.part(part, rows))


def _write(lines: Sequence[str]) -> None:
    for line in lines:
        # As it was read, whatever the locale: a replaced character is a wrong word.
        sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    shared_flags.run(main, names=FLAGS)
