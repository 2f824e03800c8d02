"""Makes the folders of two clusters, each with one language.

    python -m scripts.split_parallel --data_dir=FOLDER --pair=es-en --out=sides

The source cluster gets sides/source and the target cluster sides/target. When they
meet, they check by ids that both have the same examples; no text crosses.
"""

import pathlib

from absl import flags

from experiments import shared_flags
from experiments.abnet import config
from nebula_jax import errors
from nebula_jax.data import parallel_side, split_parallel

FLAGS = (
    "out",
    "data_dir",
    "pair",
    "corpora",
    "max_pairs",
    "max_words",
    "held_out_pairs",
)


def main() -> int:
    """Writes --out."""
    values = flags.FLAGS
    if not values.out:
        raise errors.SettingsError("--out=FOLDER is needed: where the two sides go")
    languages = config.languages(values.pair)
    folders = split_parallel.split(
        values.data_dir,
        languages,
        pathlib.Path(values.out),
        values.corpora or None,
        values.max_pairs,
        values.max_words,
        values.held_out_pairs,
    )
    for folder, language in zip(folders, languages, strict=True):
        sizes = {
            split: len(parallel_side.read(parallel_side.path(folder, split)).ids)
            for split in parallel_side.splits(folder)
        }
        described = ", ".join(f"{split} {size}" for split, size in sizes.items())
        print(f"{folder}: {language}, {described}")
    return 0


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=FLAGS)
