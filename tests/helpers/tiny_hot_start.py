"""Tiny checkpoints for an M3 run to begin with, and the models it makes of them."""

import pathlib

import configured
import tiny_nli
import tiny_runs
from absl import flags
from absl.testing import flagsaver

from experiments.m3 import config, models
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from scripts import train_vocabulary

WORDS = ["the", "has", "doors", "and", "windows", "house", "das", "hat", "ina"]
WORDS += ["Türen", "und", "Fenster", "milango", "na", "madirisha"]  # most of the text
UNSAID = [f"unsaid{n}" for n in range(15)]
LENGTH = 12  # of a sequence; the checkpoint has 16 positions


def write_model(folder: pathlib.Path, **how) -> pathlib.Path:
    """Two layers of width 16; half of its pieces are not in the runs' text."""
    tiny_nli.write_model(folder, words=WORDS + UNSAID, **how)
    pieces = (folder / "vocab.txt").read_text().splitlines(keepends=True)
    # Its control pieces are not the first five, as XLM-R's are not.
    (folder / "vocab.txt").write_text("".join(pieces[3:] + pieces[:3]))
    return folder


def vocabulary(out: pathlib.Path, **given) -> vocabularies.Vocabulary:
    """The vocabulary that scripts/train_vocabulary.py makes with these flags."""
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(out=str(out), **given):
        assert train_vocabulary.main() == 0
    return vocabularies.load(out)


def left_of(folder: pathlib.Path, family: str, change) -> tuple[pathlib.Path, ...]:
    """What an M3 run begins with and leaves, without the run: the folders of the
    checkpoint before and after, and the vocabulary's; `change` is what the run does to
    the discriminator's `embeddings` and `encoder`."""
    before = write_model(folder / "before", family=family)
    given = {
        "hot_start": str(before),
        "data_dir": str(tiny_runs.write_text(folder / "text")),
        "generators": "en de|sw",
        "max_length": LENGTH,
        "body": "modern" if family == "modernbert" else "bert",
    }
    pieces = vocabulary(folder / "vocabulary", **given)
    run = configured.run(config, **given)
    made = models.load(run, pieces)
    models.export(folder, run, made, pieces, change(made.discriminator))
    return before, folder / "encoder", folder / "vocabulary"
