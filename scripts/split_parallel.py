"""Makes the folders of two clusters, each with its own language alone.

    python -m scripts.split_parallel --data_dir=FOLDER --pair=es-en --out=sides

The source cluster is given sides/source and the target cluster sides/target. That both
have the same examples they find out by ids when they meet; no text crosses.
"""

import pathlib

from absl import flags

from experiments import abnet_text, clusters, lifecycle
from nebula_jax.data import sides
from scripts.out import OUT

for name in ("out", "data_dir", "pair", "pair_sources", "max_pairs", "max_words"):
    flags.declare_key_flag(name)


def main() -> int:
    """Writes --out."""
    if not OUT.value:
        raise clusters.FlagError("--out=FOLDER is needed: where the two sides go")
    languages = abnet_text.languages()
    folders = sides.split_parallel(
        clusters.DATA_DIR.value,
        languages,
        pathlib.Path(OUT.value),
        abnet_text.SOURCES.value or None,
        abnet_text.MAX_PAIRS.value,
        abnet_text.MAX_WORDS.value,
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
