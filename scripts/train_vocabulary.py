"""Makes the vocabulary that all clusters of a pre-training run share.

    python -m scripts.train_vocabulary --data_dir=FOLDER --vocab_size=8000 --out=v.model

Run it once, where text of all languages is, and copy the file to every cluster: they
compare its digest when they meet. (It contains pieces of words, not sentences.) The
languages are those of pretrain_m3's --generators, or of pretrain_bert's --languages if
these are given.

    python -m scripts.train_vocabulary --hot_start=e5-small --data_dir=FOLDER --out=v

writes a folder instead: the tokenizer of the encoder that a run begins with, with the
pieces that the text has most.
"""

import pathlib

from absl import flags

from experiments import shared_flags
from experiments.m3 import config, data
from experiments.pretraining import text
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import errors


def main() -> int:
    """Writes --out."""
    if not flags.FLAGS.out:
        raise errors.SettingsError("--out=FILE is needed: where the vocabulary goes")
    run, out = config.from_flags(), pathlib.Path(flags.FLAGS.out)
    local = run.local.of_discriminator()
    if flags.FLAGS["languages"].using_default_value:
        groups = data.checked(run).agreed.groups()
    else:
        groups = text.groups(flags.FLAGS.languages, local)
    if local.hot_start and out.exists():
        raise errors.SettingsError(f"--out={out} is there already; move it away")
    languages = [language for group in groups for language in group]
    size = shared_vocabulary.make(local, languages, out)
    print(f"{out}: {size} pieces, {', '.join(languages)}")
    return 0


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=["out", "languages", *config.FLAGS])
