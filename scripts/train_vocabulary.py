"""Makes the vocabulary that all clusters of an M3 run share.

    python -m scripts.train_vocabulary --data_dir=FOLDER --vocab_size=8000 --out=v.model

Run it once, where text of all languages is, and copy the file to every cluster: they
compare its digest when they meet. (It contains pieces of words, not sentences.)

    python -m scripts.train_vocabulary --hot_start=e5-small --data_dir=FOLDER --out=v

writes a folder instead: the tokenizer of the encoder that a run begins with, with the
pieces that the text has most.
"""

import pathlib

from absl import flags

from experiments import shared_flags
from experiments.m3 import config, data
from nebula_jax import errors

for _name in ("out", *config.FLAGS):
    flags.declare_key_flag(_name)


def main() -> int:
    """Writes --out."""
    if not flags.FLAGS.out:
        raise errors.SettingsError("--out=FILE is needed: where the vocabulary goes")
    run, out = data.checked(config.from_flags()), pathlib.Path(flags.FLAGS.out)
    if run.local.hot_start and out.exists():
        raise errors.SettingsError(f"--out={out} is there already; move it away")
    size = data.make_vocabulary(run, out)
    languages = [language for group in run.agreed.groups() for language in group]
    print(f"{out}: {size} pieces, {', '.join(languages)}")
    return 0


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS)
