"""Trains the sentencepiece vocabulary that the clusters of a run share.

    python -m scripts.train_vocabulary --data_dir=FOLDER --vocab_size=8000 --out=v.model

Run it once, where text of all languages is, and copy the file to every cluster: they
compare its digest when they meet. (It contains pieces of words, not sentences.)

    python -m scripts.train_vocabulary --hot_start=e5-small --data_dir=FOLDER --out=v

writes a folder instead: the tokenizer of the encoder that a run begins with, with the
pieces that the text has most.
"""

import pathlib

from absl import flags

from experiments import lifecycle, shared_flags
from experiments.m3 import config as m3_config
from experiments.m3 import data as m3_data
from scripts.out import OUT

flags.declare_key_flag("out")
flags.declare_key_flag("data_dir")
flags.declare_key_flag("vocab_size")
flags.declare_key_flag("generators")
flags.declare_key_flag("hot_start")
flags.declare_key_flag("pretrained_dir")


def main() -> int:
    """Writes --out."""
    if not OUT.value:
        raise shared_flags.FlagError("--out=FILE is needed: where the vocabulary goes")
    owners = m3_data.check()
    languages = [language for group in owners for language in group]
    out = pathlib.Path(OUT.value)
    if m3_config.HOT_START.value and out.exists():
        raise shared_flags.FlagError(f"--out={out} is there already; move it away")
    size = m3_data.make_vocabulary(owners, out)
    print(f"{OUT.value}: {size} pieces, {', '.join(languages)}")
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
