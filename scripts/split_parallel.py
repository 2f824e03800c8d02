"""Makes the folders of two clusters, each with its own language alone.

    python -m scripts.split_parallel --data_dir=FOLDER --pair=es-en --out=sides

Give sides/source to the source cluster and sides/target to the target cluster. When
they meet they compare keyed digests of the examples' ids; no text crosses.
"""

import pathlib

from absl import flags

from experiments import lifecycle, shared_flags
from experiments.abnet import data as abnet_data
from nebula_jax.data import parallel_side, split_parallel

for name in ("out", "data_dir", "pair", "pair_sources", "max_pairs", "max_words"):
    flags.declare_key_flag(name)


def main() -> int:
    """Writes --out."""
    if not shared_flags.OUT.value:
        raise shared_flags.FlagError("--out=FOLDER is needed: where the two sides go")
    languages = abnet_data.languages()
    folders = split_parallel.split(
        shared_flags.DATA_DIR.value,
        languages,
        pathlib.Path(shared_flags.OUT.value),
        abnet_data.SOURCES.value or None,
        abnet_data.MAX_PAIRS.value,
        abnet_data.MAX_WORDS.value,
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
    lifecycle.run(main)
