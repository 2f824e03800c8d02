"""Makes the folders of two clusters, each with its own language alone.

    python -m scripts.split_parallel --data_dir=FOLDER --pair=es-en --out=sides

The source cluster is given sides/source and the target cluster sides/target. That both
have the same examples they find out by ids when they meet; no text crosses.
"""

import pathlib

from absl import flags

from experiments import clusters, lifecycle
from nebula_jax.data import sides
from scripts.out import OUT

PAIR = flags.DEFINE_string("pair", "es-en", "Languages of source and target.")
SOURCES = flags.DEFINE_list(
    "pair_sources",
    [],
    "What the column `source` of training pairs may say; empty for all of them.",
)
MAX_PAIRS = flags.DEFINE_integer(
    "max_pairs", None, "Training pairs at most; all if not given.", lower_bound=1
)
flags.declare_key_flag("out")
flags.declare_key_flag("data_dir")


def main() -> int:
    """Writes --out."""
    if not OUT.value:
        raise clusters.FlagError("--out=FOLDER is needed: where the two sides go")
    languages = tuple(PAIR.value.split("-"))
    if len(languages) != 2:
        raise clusters.FlagError(f"--pair={PAIR.value}: expected two, such as es-en")
    folders = sides.split_parallel(
        clusters.DATA_DIR.value,
        languages,
        pathlib.Path(OUT.value),
        SOURCES.value or None,
        MAX_PAIRS.value,
    )
    for folder, language in zip(folders, languages, strict=True):
        sizes = {
            split: len(sides.read(sides.path(folder, split)).ids)
            for split in sides.splits(folder)
        }
        described = ", ".join(f"{split} {size}" for split, size in sizes.items())
        print(f"{folder}: {language}, {described}")
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
