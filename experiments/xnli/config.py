"""The configuration of an XNLI run: its flags, and the values that are passed on."""

import dataclasses
import pathlib
from typing import Any

import optax
from absl import flags

from experiments import configuration, fields
from nebula_jax import errors
from nebula_jax.data import text_folder
from nebula_jax.models import classifier
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import optimizers

flags.DEFINE_string(
    "encoder",
    "e5-small",
    "Encoder to fine-tune: a name of scripts/prepare_pretrained.py, or a checkpoint"
    " folder.",
)
flags.DEFINE_bool(
    "skip_missing_languages",
    False,
    "Leave out languages without test pairs, instead of refusing to start.",
)
flags.DEFINE_enum(
    "dataset",
    "folder",
    ["folder", "tfds:xnli"],
    "Source of dev and test pairs: --data_dir, or TFDS's xnli if it is prepared (else"
    " --data_dir by way of a TFDS builder). Training pairs are always --data_dir's.",
)
flags.DEFINE_string(
    "tfds_dir",
    None,
    "Folder where TFDS's datasets are prepared; its own default if not given.",
)
flags.DEFINE_integer(
    "max_train_pairs",
    None,
    "Largest number of training pairs, drawn by --seed; all if not given.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "max_test_pairs",
    0,
    "Largest number of test pairs of each language, the same for all seeds; 0 for all.",
    lower_bound=0,
)
flags.DEFINE_bool(
    "trim_vocabulary", True, "Keep only rows of the table that some pair here needs."
)
flags.DEFINE_integer(
    "encoder_layers",
    0,
    "Layers of --encoder that are kept, the first ones; 0 for all.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "freeze_layers",
    0,
    "First layers that are left as they are, with --freeze_embeddings.",
    lower_bound=0,
)
flags.DEFINE_enum(
    "pooling",
    "cls",
    list(classifier.POOLINGS),
    "Input of the classifier: cls (the first position), or the mean of all.",
)
flags.DEFINE_float(
    "epochs",
    0.0,
    "Times that each training pair is seen; if 0, --steps counts.",
    lower_bound=0,
)
flags.DEFINE_float(
    "encoder_dropout",
    0.1,
    "Dropout rate in the encoder.",
    lower_bound=0.0,
    upper_bound=0.9,
)
flags.DEFINE_float(
    "classifier_dropout",
    0.1,
    "Dropout rate before the classifier's last layer.",
    lower_bound=0,
    upper_bound=0.9,
)
flags.DEFINE_enum(
    "checkpoint_selection",
    "best",
    ["best", "last", "average"],
    "Parameters to test: those of the step with the best accuracy on English dev, the"
    " earliest of equals; of the last step; or the average of those at all evaluations"
    " on English dev since the warm-up.",
)
flags.DEFINE_bool(
    "export",
    False,
    "Leave the fine-tuned encoder, all of its pieces, as a checkpoint folder in"
    " <run>/finetune/encoder; with --eval_only too.",
)
flags.DEFINE_bool(
    "eval_only", False, "Test what --run trained, on --data_dir; train nothing."
)
flags.DEFINE_enum(
    "split",
    "test",
    ["dev", "test"],
    "Split that is tested, at the end of a run or by --eval_only. With dev no test row"
    " is read, as where one recipe of several is to be chosen.",
)
flags.DEFINE_string(
    "predictions_dir",
    "",
    "Folder that --eval_only writes to; if empty,"
    " <run>/evaluated/<split>-<digest of the text>.",
)

DEFAULTS = {
    "languages": list(text_folder.LANGUAGES),
    "learning_rate": 5e-5,
    "layer_decay": 0.8,
    "length_buckets": ["24", "32", "48", "64", "96"],
    "eval_every": 500,
}
"""Shared flags that have another default in this experiment."""
COMMAND = ("eval_only", "run", "predictions_dir")
"""Flags that no run keeps: they choose what this command does."""

NAME = "finetune"
"""Name of the run's one cluster, and of its folder."""
ENGLISH = "en"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(configuration.Agreed):
    """The settings that a resumed run must share with its beginning."""

    encoder: str
    """A name or a folder."""
    dataset: str
    """Source of dev and test: `folder` or `tfds:xnli`."""
    max_train_pairs: int | None
    """None for all."""
    max_test_pairs: int
    """Test pairs of each language; 0 for all."""
    length_buckets: tuple[int, ...]
    """Tokens of a row, ascending."""
    encoder_layers: int
    """The first ones; 0 for all."""
    trim_vocabulary: bool
    freeze_embeddings: bool
    freeze_layers: int
    """First layers that do not train."""
    pooling: str
    dtype: str
    encoder_dropout: float
    classifier_dropout: float
    learning_rate: float
    """At its peak."""
    warmup_ratio: float
    """Share of all steps."""
    layer_decay: float
    clip_norm: float
    """Largest global norm of the gradient; 0 for no clipping."""
    eval_every: int
    """Steps."""
    checkpoint_selection: str
    """`best`, `last` or `average`."""

    def is_evaluated(self, step: int) -> bool:
        """Returns True if English dev is evaluated after `step`."""
        return step % self.eval_every == 0 or step == self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(configuration.Place):
    """The settings that each command of a run chooses for itself."""

    pipeline: int
    """Micro-batches of a pipeline over the devices of an fsdp group; 0 for none."""
    languages: tuple[str, ...]
    skip_missing_languages: bool
    tfds_dir: str | None
    """None for TFDS's default."""
    epochs: float
    """Passes over the training pairs; 0 for the given steps."""
    eval_batch_size: int
    split: str
    """The one that is tested: dev or test."""
    export: bool
    """True to leave the encoder as a checkpoint folder."""


Run = configuration.Run[Agreed, Local]

FLAGS = [*fields.define(Agreed, Local), *COMMAND]


def from_flags() -> Run:
    """Returns the flags as values; for `main`."""
    return Run(fields.read(Agreed), fields.read(Local))


def context(run: Run) -> context_lib.Context:
    """Returns the context of the training loop."""
    local = run.local
    return context_lib.Context(
        context_lib.Settings(
            workdir=local.workdir,
            cluster=NAME,
            steps=run.agreed.steps,
            checkpoint_every=run.agreed.checkpoint_every,
            log_every=local.log_every,
            allow_nonfinite=local.allow_nonfinite,
            trace=local.trace,
        )
    )


def with_epochs(run: Run, steps_per_epoch: int) -> Run:
    """Returns the run with the steps that --epochs takes, if it is given."""
    if not run.local.epochs:
        return run
    return run.with_agreed(steps=max(1, round(run.local.epochs * steps_per_epoch)))


def check(run: Run) -> None:
    """Raises errors.SettingsError at what cannot work, before anything starts."""
    devices.check(run.local.layout(), run.agreed.batch_size, run.agreed.micro_batches)
    lengths = run.agreed.length_buckets
    is_ascending = list(lengths) == sorted(set(lengths))
    if not lengths or not is_ascending or lengths[0] < 6 or len(lengths) > 250:
        raise errors.SettingsError(
            f"--length_buckets={','.join(map(str, lengths))}: must ascend, from 6 or"
            " more, at most 250 of them"
        )
    if run.agreed.freeze_layers and not run.agreed.freeze_embeddings:
        raise errors.SettingsError(
            f"--freeze_layers={run.agreed.freeze_layers} needs --freeze_embeddings,"
            " which are below them"
        )
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


def data_dir(local: Local) -> pathlib.Path:
    """Returns the text folder with the pairs."""
    return pathlib.Path(local.data_dir)


def optimizer(agreed: Agreed, layers: int) -> optax.GradientTransformation:
    """Returns Adam with a linear warm-up and decay, slower in lower layers.

    Args:
      agreed: of the run.
      layers: of the encoder.
    """
    schedule = optimizers.linear_decay(
        agreed.learning_rate, round(agreed.warmup_ratio * agreed.steps), agreed.steps
    )
    return optax.chain(
        optimizers.adam(schedule, clip_norm=agreed.clip_norm),
        optimizers.scale_by_layer(agreed.layer_decay, layers),
    )


def settings(agreed: Agreed, text_digest: str) -> dict[str, Any]:
    """Returns what a checkpoint is checked against.

    Args:
      agreed: of the run.
      text_digest: of all pairs.
    """
    values = configuration.settings(agreed)
    del values["--checkpoint_every"]  # the run has no other process: this may change
    return values | {"text": text_digest}
