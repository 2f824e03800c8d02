"""A small real corpus from an ordinary pip package: Django's message catalogs.

Volunteers translated the interface messages of Django (BSD license) into all 15
languages of XNLI. Each message has its English source, so the catalogs are
monolingual and parallel text at once. It is short, technical and repetitive: enough to
see every part of the system work, far too little to learn a language from.
"""

import hashlib
import html
import importlib.util
import json
import pathlib
import re
import unicodedata

from nebula_jax import files, installed
from nebula_jax.data import text_folder, tsv

CATALOG = {"zh": "zh_Hans"}  # Django's name where it is not the ISO 639-1 code
HELD_OUT = 10  # one message in so many is held out, the same ones in every language

# Two generators, so that the quickstart shows K > 1: the European languages, the rest.
EXAMPLE_CLUSTERS = {
    "K=1": [list(text_folder.LANGUAGES)],
    "K=2": [
        ["en", "de", "fr", "es", "el", "bg", "ru"],
        ["hi", "ur", "ar", "tr", "sw", "zh", "vi", "th"],
    ],
}

_TAG = re.compile(r"<[^>]+>")
_PLACEHOLDER = re.compile(r"%(\(\w+\))?[-#0-9.]*[a-z]|\{\w*\}")
_SPACE = re.compile(r"\s+")


def write_text_folder(out_dir: pathlib.Path) -> None:
    """Writes the catalogs as a text folder, 0.4 MB of text, over what is in `out_dir`.

    Raises:
      CorpusError: if Django is not installed, or its wheel has no catalogs.
    """
    catalogs = {language: _messages(language) for language in text_folder.LANGUAGES[1:]}
    english = sorted(set().union(*catalogs.values()))
    (out_dir / "mono").mkdir(parents=True, exist_ok=True)
    (out_dir / "parallel").mkdir(exist_ok=True)

    mono = {"en": {message: message for message in english}, **catalogs}
    for language, messages in mono.items():
        train = [text for source, text in messages.items() if not _is_held_out(source)]
        valid = [text for source, text in messages.items() if _is_held_out(source)]
        for split, lines in (("train", train), ("valid", valid)):
            _write(out_dir / "mono" / f"{language}.{split}.txt", lines)
    for language, messages in catalogs.items():
        for split, wanted in (("train", False), ("dev", True)):
            rows = [
                f"{source}\t{text}"
                for source, text in messages.items()
                if _is_held_out(source) == wanted
            ]
            path = out_dir / "parallel" / f"en-{language}.{split}.tsv"
            _write(path, [f"en\t{language}", *rows])
    with files.writing(out_dir / "mono" / "families.json") as partial:  # it is the last
        families = {"example_clusters": EXAMPLE_CLUSTERS}
        partial.write_text(json.dumps(families, indent=1), "utf-8")


def _write(path: pathlib.Path, lines: list[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines), "utf-8")


def _is_held_out(source: str) -> bool:
    """Chooses held-out messages by their English source, alike in all languages."""
    return hashlib.sha256(source.encode()).digest()[0] % HELD_OUT == 0


def _messages(language: str) -> dict[str, str]:
    """Reads English source -> translation, cleaned, sorted by source, each once."""
    with installed.extra("quickstart"):
        import polib
    spec = importlib.util.find_spec("django")
    if spec is None or spec.origin is None:
        raise tsv.CorpusError(
            "data_dir=package:django needs Django's wheel: pip install 'Django<6'"
        )
    root = pathlib.Path(spec.origin).parent
    name = CATALOG.get(language, language)
    messages: dict[str, str] = {}
    for path in sorted(root.glob(f"**/locale/{name}/LC_MESSAGES/*.mo")):
        for entry in polib.mofile(str(path)):
            if entry.msgstr_plural:  # the plural form reads as a sentence
                source, text = entry.msgid_plural, entry.msgstr_plural[0]
            else:
                source, text = entry.msgid, entry.msgstr
            source, text = _clean(source), _clean(text)
            if source and text and source != text:
                messages.setdefault(source, text)
    return dict(sorted(messages.items()))


def _clean(text: str) -> str:
    """Removes tags, entities, placeholders, control characters and newlines."""
    text = html.unescape(_TAG.sub(" ", text))
    text = _PLACEHOLDER.sub("…", text)
    text = "".join(c for c in text if unicodedata.category(c)[0] != "C" or c in " \n\t")
    return _SPACE.sub(" ", unicodedata.normalize("NFC", text)).strip()
