"""Translates lines with a trained ABNet, both of its sides in this process.

    python -m experiments.translate --run=runs/abnet_es_en < spanish.txt > english.txt

A line of input is a sentence, and gives a line of output. `--run` is the folder of a
run that trained both sides here. The flags of the run hold; --beams and --iterations
may be given. In a notebook there are no flags:

    from experiments.abnet import translator
    translator.Translator("runs/abnet_es_en").translate(["una casa", "dos puertas"])
"""

import dataclasses
import pathlib
import sys

from experiments import configuration, shared_flags
from experiments.abnet import config, translator
from nebula_jax.commands import fields
from nebula_jax.data import tsv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The settings that no run keeps: they choose what this command does."""

    run: str
    # Those of the run that may be replaced.
    beams: int
    iterations: int
    pretrained_dir: pathlib.Path


FLAGS = fields.define(Command)


def main() -> int:
    """Translates standard input."""
    command = fields.read(Command)
    configuration.parse_run(command.run, "train_abnet")
    run = config.from_flags()
    config.check_beams(run.agreed)
    given = tsv.lines(pathlib.Path("standard input"), sys.stdin.buffer)
    lines = [line.strip() for _, line in given]
    if not lines:
        return 0
    for line in translator.Translator(run).translate(lines):
        # As it was read, whatever the locale: a replaced character is a wrong word.
        sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=FLAGS)
