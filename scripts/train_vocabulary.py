"""Trains the sentencepiece vocabulary that the clusters of a run share.

    python -m scripts.train_vocabulary --data_dir=FOLDER --vocab_size=8000 --out=v.model

Run it once, where text of all languages is, and copy the file to every cluster: they
compare its digest when they meet. (It holds pieces of words, not sentences.)
"""

import pathlib

from absl import flags

from experiments import clusters, lifecycle, m3_setup, m3_text
from nebula_jax.data import mixtures, vocab
from scripts.out import OUT

flags.declare_key_flag("out")
flags.declare_key_flag("data_dir")
flags.declare_key_flag("vocab_size")
flags.declare_key_flag("generators")


def main() -> int:
    """Writes --out."""
    if not OUT.value:
        raise clusters.FlagError("--out=FILE is needed: where the vocabulary goes")
    owners = m3_text.check()
    languages = [language for group in owners for language in group]
    lines = mixtures.vocabulary_lines(
        m3_text.text_folder(),
        languages,
        m3_setup.MONO_ALPHA.value,
        m3_setup.VOCAB_LINES.value,
    )
    size = vocab.train(lines, m3_setup.VOCAB_SIZE.value, pathlib.Path(OUT.value))
    print(f"{OUT.value}: {size} pieces, {', '.join(languages)}")
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
