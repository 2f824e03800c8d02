"""Runs of finetune_xnli, tiny: invented pairs, and models of few layers."""

import pathlib
from collections.abc import Sequence

import configured
import tiny_checkpoints
import tiny_runs

from experiments.xnli import config
from nebula_jax.data import nli

HEADER = "\t".join(nli.COLUMNS)
COLORS = {
    "en": ["red", "green", "blue", "white"],
    "de": ["rot", "grün", "blau", "weiß"],
    "sw": ["nyekundu", "kijani", "buluu", "nyeupe"],
}
FORMS = {
    "en": ("the door is {}", 'he said " it is {}', "it is not {} at all"),
    "de": ("die Tür ist {}", 'er sagt " sie ist {}', "sie ist gar nicht {}"),
    "sw": ("mlango ni {}", 'alisema " ni {}', "si {} hata kidogo"),
}
SIZES = {"train": 96, "dev": 24, "test": 21}

TINY = {
    "encoder": "models/bert",
    "languages": "en,de,sw",
    "length_buckets": "12,16",
    "batch_size": 8,
    "eval_batch_size": 8,
    "steps": 12,
    "eval_every": 4,
    "checkpoint_every": 3,
    "learning_rate": 2e-3,
    "log_every": 2,
    "devices_per_cluster": 1,
}


def pair(n: int, language: str) -> tuple[str, str, str]:
    """Premise, hypothesis and label number n."""
    label = nli.LABELS[n % 3]
    color = n * 5 % 4
    said = color if label != "neutral" else (color + 1) % 4
    is_, says, denies = FORMS[language]
    hypothesis = denies if label == "contradiction" else says
    colors = COLORS[language]
    return is_.format(colors[color]), hypothesis.format(colors[said]), label


def lines(split: str, language: str) -> list[str]:
    """A file's lines, with its header."""
    first = list(SIZES).index(split) * 1000
    rows = [
        f"{split}-{n}\tinvented\t" + "\t".join(pair(n, language))
        for n in range(first, first + SIZES[split])
    ]
    return [HEADER, *rows]


def write_text(folder: pathlib.Path) -> pathlib.Path:
    """A folder in the project's format."""
    (folder / "nli").mkdir(parents=True)
    for split in SIZES:
        for language in FORMS if split != "train" else ("en",):
            path = folder / "nli" / f"{split}.{language}.tsv"
            path.write_text("".join(f"{line}\n" for line in lines(split, language)))
    return folder


def write_model(
    folder: pathlib.Path,
    seed: int = 0,
    unused_words: int = 3,
    has_pooler: bool = False,
    words: Sequence[str] = (),
    family: str = "bert",
    layers: int = 2,
) -> pathlib.Path:
    """A checkpoint with random weights and BERT's tokenizer, with `words` as pieces (if
    empty, those of the pairs) and some that no text has; family: whose layout."""
    sentences = [
        " ".join(pair(n, language)[:2]) for n in range(40) for language in FORMS
    ]
    said = sorted({word for sentence in sentences for word in sentence.split()})
    unused = [f"unsaid{n}" for n in range(unused_words)]
    tiny_checkpoints.write(
        folder,
        [*unused, *(words or said)],
        ("embeddings", "encoder", *(["pooler"] if has_pooler else [])),
        seed=seed,
        layers=layers,
        family=family,
    )
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    return folder


def run_in(folder: pathlib.Path, **values) -> config.Run:
    """A run's configuration in a folder that has `text` and `models/bert`, and gets
    what is prepared; values: flags that differ from TINY."""
    given = {
        "data_dir": folder / "text",
        "encoder": folder / "models" / "bert",
        "prepared_dir": folder / "prepared",
        "workdir": folder / "run",
    }
    return configured.run(config, **TINY | given | values)


class Finetunings(tiny_runs.Runs):
    """Starts finetune_xnli in a folder of its own."""

    module = "experiments.finetune_xnli"

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder)
        write_model(folder / "models" / "bert", layers=1)  # soon compiled

    def write_text(self, folder: pathlib.Path) -> pathlib.Path:
        """Writes the pairs of the runs that name no others; their folder."""
        return write_text(folder)

    def flags(self) -> dict:
        return TINY | {"data_dir": "text", "prepared_dir": "prepared"}
