"""Makes the folders of two clusters, each with one language.

    python -m scripts.split_parallel --data_dir=FOLDER --pair=es-en --out=sides

The source cluster gets sides/source and the target cluster sides/target. When they
meet, they check by ids that both have the same examples; no text crosses.
"""

import pathlib

from absl import flags

from experiments import shared_flags
from experiments.abnet import config, data
from nebula_jax import errors
from nebula_jax.data import parallel_side

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
    out = flags.FLAGS["out"].value
    if not out:
        raise errors.SettingsError("--out=FOLDER is needed: where the two sides go")
    run = config.from_flags()
    folders = data.split(run, pathlib.Path(out))
    for folder, language in zip(
        folders, config.languages(run.agreed.pair), strict=True
    ):
        sizes = {
            split: len(parallel_side.read(parallel_side.path(folder, split)).ids)
            for split in parallel_side.splits(folder)
        }
        described = ", ".join(f"{split} {size}" for split, size in sizes.items())
        print(f"{folder}: {language}, {described}")
    return 0


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=FLAGS)
