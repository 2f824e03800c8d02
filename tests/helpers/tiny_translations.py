"""Runs of train_abnet, tiny: an invented corpus, and models of two layers."""

import pathlib

import configured
import tiny_checkpoints
import tiny_runs

from experiments.abnet import config

# English, Spanish. A long sentence of one language may be a short one of the other.
SHORT = ("the {} has {} doors", "la {} tiene {} puertas")
LONG = (
    "the {} near the {} has {} doors and {} windows",
    "la {} cerca de la {} tiene {} puertas y {} ventanas",
)
THINGS = {"house": "casa", "school": "escuela", "church": "iglesia", "tower": "torre"}

PAIRS = {"train": 60, "dev": 5, "test": 4}

TINY = {
    "pair": "es-en",
    "objective": "cmlm",
    "encoder_adapter_dim": 8,
    "decoder_adapter_dim": 8,
    "cross_attention_heads": 2,
    "length_buckets": "8,16",
    "batch_size": 8,
    "micro_batches": 2,
    "max_in_flight": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 1,
    "mlm_head_steps": 3,
    "eval_every": 100,
    "bleu_sentences": 3,
    "beams": 2,
    "iterations": 2,
    "log_every": 2,
    "connect_timeout": 60,
    "peer_timeout": 20,
    "devices_per_cluster": 1,
}


# Models of one layer and sentences of one length: soon compiled.
ALIKE = {
    "data_dir": "alike",
    "source_model": "models/shallow_spanish",
    "target_model": "models/shallow_english",
    "length_buckets": "8",
    "objective": "ar",
}


def pair(n: int) -> tuple[str, str]:
    """The n-th sentence in English and in Spanish; every third is long."""
    names = list(THINGS)
    things = names[n % 4], names[n * 7 % 3]
    forms, numbers = (LONG, (n % 40, n * 3 % 17)) if n % 3 == 0 else (SHORT, (n % 40,))
    things = things[: len(numbers)]
    spanish = [THINGS[thing] for thing in things]
    return forms[0].format(*things, *numbers), forms[1].format(*spanish, *numbers)


def write_text(folder: pathlib.Path, is_alike: bool = False) -> pathlib.Path:
    """A text folder in the project's format; if `is_alike`, of short sentences of one
    length, so that the models are compiled for one shape."""
    (folder / "parallel").mkdir(parents=True)
    first = 0
    for split, count in PAIRS.items():
        numbers = range(first, first + count)
        if is_alike:
            numbers = (3 * n + 1 for n in numbers)
        rows = ["en\tes", *("\t".join(pair(n)) for n in numbers)]
        path = folder / "parallel" / f"en-es.{split}.tsv"
        path.write_text("".join(row + "\n" for row in rows))
        first += count
    return folder


def write_model(
    folder: pathlib.Path,
    width: int,
    seed: int,
    has_head: bool = False,
    layers: int = 2,
    family: str = "bert",
) -> pathlib.Path:
    """A checkpoint with random weights and BERT's tokenizer, of the text's words;
    width: D; has_head: with an MLM head; family: whose layout."""
    sentences = [" ".join(pair(n)) for n in range(3 * sum(PAIRS.values()))]
    words = sorted({word for sentence in sentences for word in sentence.split()})
    parts = ("embeddings", "encoder", *(["mlm_head"] if has_head else []))
    return tiny_checkpoints.write(
        folder, [*words, "unsaid"], parts, width, seed, layers, family
    )


def run(**values) -> config.Run:
    """The configuration that the command has if it is given these flags."""
    return configured.run(config, **values)


class Translations(tiny_runs.Runs):
    """Starts train_abnet in a folder of its own."""

    module = "experiments.train_abnet"

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder)
        write_text(folder / "alike", is_alike=True)
        # The paper's pair: ERNIE-M reads, BERT writes.
        write_model(folder / "models" / "spanish", 16, seed=0, family="ernie_m")
        write_model(folder / "models" / "english", 24, seed=1)
        write_model(folder / "models" / "english_with_head", 24, 1, has_head=True)
        # Sooner compiled, for runs that are started often.
        write_model(
            folder / "models" / "shallow_spanish", 16, 0, layers=1, family="ernie_m"
        )
        write_model(folder / "models" / "shallow_english", 24, 1, True, layers=1)

    def write_text(self, folder: pathlib.Path) -> pathlib.Path:
        """Writes the corpus of the runs that name no other; its folder."""
        return write_text(folder)

    def flags(self) -> dict:
        return TINY | {
            "data_dir": "text",
            "prepared_dir": "prepared",
            "source_model": "models/spanish",
            "target_model": "models/english_with_head",
        }

    def sides(self, workdir: str, step: int) -> list:
        """What source and target saved after `step`, of a split run or a whole one."""
        if (self.folder / workdir / "whole").is_dir():
            return list(self.state(workdir, "whole", step))
        return [self.state(workdir, name, step) for name in ("source", "target")]
