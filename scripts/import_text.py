"""Makes a text folder, a language or a pair at a time, of text in other formats.

    python -m scripts.import_text --input=news.de,web.de.gz --languages=de --out=text
    python -m scripts.import_text --input=bible.de,bible.fr --languages=de,fr --out=text
    python -m scripts.import_text --input=pages.jsonl --columns=body --languages=sw \\
        --out=text
    python -m scripts.import_text --input=saved/opus --languages=de,fr --out=text

An input is plain text, a line of it a sentence; of a pair two such files, line by line
translations (Moses); JSON Lines; Parquet; a folder of Hugging Face's `datasets`, saved
(save_to_disk), from its cache or as it lies on the hub; a folder of TFDS, or tfds:NAME.

Rows that are empty, undecodable, too long, duplicated or misaligned are dropped and
counted, with the places of the first ones; imports/ of the folder keeps the report.
Of --to_split=train the splits that the folder lacks are held out: valid, of a pair dev
and test; so import splits of your own before it. M3, BERT and ABNet read the folder.
"""

import pathlib
import re

from absl import flags

from experiments import shared_flags
from nebula_jax import errors
from nebula_jax.data import text_cleaning, text_import

flags.DEFINE_list("input", [], "Files, folders or tfds:NAME to read, in this order.")
flags.DEFINE_list(
    "columns",
    [],
    "Columns of the text, one for each of --languages, where a format has columns; the"
    " languages' codes, or text, if empty.\n"
    "translation.de,translation.fr: columns within a column.",
)
flags.DEFINE_string("from_split", "train", "Split of a dataset to read.")
flags.DEFINE_enum(
    "to_split",
    "train",
    ["train", "valid", "dev", "test"],
    "Split of the text folder to write.",
)
flags.DEFINE_integer(
    "held_out",
    500,
    "Rows of each split that is taken out of train, at most a tenth; 0 for none.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "max_characters",
    text_cleaning.LIMITS.characters,
    "Longest text that is kept, in characters.",
    lower_bound=1,
)
flags.DEFINE_float(
    "max_ratio",
    text_cleaning.LIMITS.ratio,
    "Largest ratio of the lengths of a pair, in characters.",
    lower_bound=1.0,
)


def main() -> int:
    """Writes --out, and prints what was dropped and why."""
    given = {name: flags.FLAGS[name].value for name in ("input", "languages", "out")}
    languages, split = given["languages"], flags.FLAGS["to_split"].value
    if not given["input"] or not given["out"]:
        missing = "out=FOLDER" if given["input"] else "input=FILE"
        raise errors.SettingsError(f"{missing} is needed")
    are_codes = all(re.fullmatch(r"\w{2,35}", each, re.ASCII) for each in languages)
    is_pair = len(languages) == 2 and languages[0] != languages[1]
    if languages == ["all"] or not are_codes or not (is_pair or len(languages) == 1):
        raise errors.SettingsError(
            f"languages={','.join(languages)}: expected one such as de or pt_BR, or a"
            " pair such as de,fr"
        )
    if split not in (known := text_cleaning.SPLITS[len(languages)]):
        raise errors.SettingsError(
            f"to_split={split}: text of {'-'.join(languages)} has {', '.join(known)}"
        )
    rows = text_import.read(
        given["input"],
        languages,
        flags.FLAGS["columns"].value,
        flags.FLAGS["from_split"].value,
    )
    report = text_cleaning.write(
        rows,
        pathlib.Path(given["out"]),
        languages,
        split=split,
        held_out=flags.FLAGS["held_out"].value,
        limits=text_cleaning.Limits(
            flags.FLAGS["max_characters"].value, flags.FLAGS["max_ratio"].value
        ),
    )
    print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["languages", "out"])
