"""The configuration of an XNLI run: its flags, and the values that are passed on."""

import dataclasses
from typing import Any

import optax

from experiments import configuration, shared_flags
from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.data import text_folder
from nebula_jax.models import classifier
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import optimizers

DEFAULTS = {
    "languages": list(text_folder.LANGUAGES),
    "learning_rate": 5e-5,
    "layer_decay": 0.8,
    "length_buckets": ["24", "32", "48", "64", "96"],
    "eval_every": 500,
}
"""Shared flags that have another default in this experiment."""
NAME = "finetune"  # name of the run's one cluster, and of its folder
ENGLISH = "en"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(configuration.Agreed):
    """The settings that a resumed run must share with its beginning."""

    encoder: str = fields.to_begin_with(
        "e5-small",
        "Encoder to fine-tune: a name of scripts/prepare_pretrained.py, a checkpoint"
        " folder, or hf:ORG/NAME@COMMIT.",
    )
    max_train_pairs: int | None = fields.of_data(
        None,
        "Largest number of training pairs, drawn by --seed; all if not given.",
        lower=1,
    )
    max_test_pairs: int = fields.of_data(
        0,
        "Largest number of test pairs of each language, the same for all seeds; 0 for"
        " all.",
    )
    length_buckets: tuple[int, ...]
    encoder_layers: int = fields.of_model(
        0, "Layers of --encoder that are kept, the first ones; 0 for all."
    )
    trim_vocabulary: bool = fields.of_training(
        True, "Keep only rows of the table that some pair here needs."
    )
    freeze_embeddings: bool
    pooling: str = fields.of_model(
        "cls",
        "Input of the classifier: cls (the first position), or the mean of all.",
        choices=list(classifier.POOLINGS),
    )
    encoder_dropout: float = fields.of_training(
        0.1, "Dropout rate in the encoder.", upper=0.9
    )
    classifier_dropout: float = fields.of_training(
        0.1, "Dropout rate before the classifier's last layer.", upper=0.9
    )
    warmup_ratio: float
    layer_decay: float
    clip_norm: float
    checkpoint_selection: str = fields.of_training(
        "best",
        "Parameters to test: those of the step with the best accuracy on English dev,"
        " the earliest of equals; or of the last step.",
        choices=["best", "last"],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(configuration.Place):
    """The settings that each command of a run chooses for itself."""

    pipeline: int
    languages: tuple[str, ...]
    epochs: float = fields.to_begin_with(
        0.0, "Times that each training pair is seen; if 0, --steps counts."
    )
    eval_batch_size: int
    split: str = fields.of_run(
        "test",
        "Split that is tested, at the end of a run or by --eval_only. With dev no test"
        " row is read, as where one recipe of several is to be chosen.",
        choices=["dev", "test"],
    )
    export: bool = fields.of_run(
        False,
        "Leave the fine-tuned model, all of its pieces, as a checkpoint folder in"
        " <run>/finetune/encoder; with --eval_only too. With --pooling=cls its"
        " classifier is there, for transformers.",
    )


Run = configuration.Run[Agreed, Local]

FLAGS = fields.define(Agreed, Local, shared_flags.Command)


def from_flags() -> Run:
    """Returns the flags as values; for `main`."""
    return Run(fields.read(Agreed), fields.read(Local))


def check(run: Run) -> None:
    """Raises errors.SettingsError at what cannot work, before anything starts."""
    devices.check(run.local.layout(), run.agreed.batch_size, run.agreed.micro_batches)
    shared_flags.check_buckets(run.agreed.length_buckets, shortest=6)
    languages = run.local.languages
    if not languages or len(set(languages)) != len(languages) or not all(languages):
        raise errors.SettingsError(
            f"--languages={','.join(languages)}: expected codes such as en,sw, each"
            " once"
        )
    if run.local.data_dir.startswith("package:"):
        raise errors.SettingsError(
            "--data_dir=FOLDER with an nli/ is needed; no package has such pairs"
        )


def optimizer(agreed: Agreed, layers: int) -> optax.GradientTransformation:
    """Returns Adam with a linear warm-up and decay, slower in lower of the layers."""
    schedule = optimizers.linear_decay(
        agreed.learning_rate, round(agreed.warmup_ratio * agreed.steps), agreed.steps
    )
    return optax.chain(
        optimizers.adam(schedule, clip_norm=agreed.clip_norm),
        optimizers.scale_by_layer(agreed.layer_decay, layers),
    )


def settings(agreed: Agreed, text_digest: str) -> dict[str, Any]:
    """Returns what a checkpoint is checked against, with the digest of all pairs."""
    values = configuration.settings(agreed)
    del values["--checkpoint_every"]  # the run has no other process: this may change
    return values | {"text": text_digest}
