"""Flags of fine-tuning on XNLI, and what is made of them before the loop begins."""

import pathlib
from typing import Any

import optax
from absl import flags

from experiments import lifecycle, shared_flags
from nebula_jax.data import text_folder, tokenizers
from nebula_jax.models import classifier, pretrained, transformer
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import packages
from nebula_jax.training import optimizers

ENCODER = flags.DEFINE_string(
    "encoder",
    "e5-small",
    "A name of scripts/prepare_pretrained.py, or a checkpoint folder.",
)
LANGUAGES = flags.DEFINE_list(
    "languages",
    list(text_folder.LANGUAGES),
    "Tested without training on them (but en).",
)
SKIP_MISSING = flags.DEFINE_bool(
    "skip_missing_languages", False, "Whether a language may have no test file."
)
DATASET = flags.DEFINE_enum(
    "dataset",
    "folder",
    ["folder", "tfds:xnli"],
    "Where dev and test are from: --data_dir, or TFDS's xnli if it is prepared (else"
    " --data_dir by way of a TFDS builder). Training pairs are always --data_dir's.",
)
TFDS_DIR = flags.DEFINE_string(
    "tfds_dir",
    None,
    "Where TFDS's datasets are prepared; its own default if not given.",
)
MAX_TRAIN_PAIRS = flags.DEFINE_integer(
    "max_train_pairs",
    None,
    "Training pairs at most, drawn by --seed; all if not given.",
    lower_bound=1,
)
MAX_TEST_PAIRS = flags.DEFINE_integer(
    "max_test_pairs",
    0,
    "Test pairs of each language at most, the same for all seeds; 0 for all.",
    lower_bound=0,
)
LENGTHS = flags.DEFINE_list(
    "length_buckets",
    ["24", "32", "48", "64", "96"],
    "Tokens of a row; a batch has pairs of one bucket. Of pairs longer than the last,"
    " the longer sentence is cut.",
)
TRIM = flags.DEFINE_bool(
    "trim_vocabulary", True, "Keep only rows of the table that some pair here needs."
)
FREEZE = flags.DEFINE_bool(
    "freeze_embeddings", False, "Train the encoder and the classifier only."
)
POOLING = flags.DEFINE_enum(
    "pooling",
    "cls",
    list(classifier.POOLINGS),
    "What is classified: the first position, or the mean of all.",
)
EPOCHS = flags.DEFINE_float(
    "epochs", 0.0, "Times that each pair is seen; if 0, --steps counts.", lower_bound=0
)
RATE = flags.DEFINE_float("rate", 5e-5, "Peak of the learning rate.", lower_bound=0.0)
LAYER_DECAY = flags.DEFINE_float(
    "layer_decay",
    0.8,
    "What a layer's rate is of that above it; 1 for one rate everywhere.",
    lower_bound=0.01,
    upper_bound=1.0,
)
WARMUP_SHARE = flags.DEFINE_float(
    "warmup_share", 0.1, "Of all steps.", lower_bound=0.0, upper_bound=1.0
)
CLIP = flags.DEFINE_float(
    "clip_gradient", 1.0, "Largest global norm; 0 for no clipping.", lower_bound=0.0
)
ENCODER_DROPOUT = flags.DEFINE_float(
    "encoder_dropout", 0.1, "In the encoder.", lower_bound=0.0, upper_bound=0.9
)
HEAD_DROPOUT = flags.DEFINE_float(
    "classifier_dropout", 0.1, "Before the last layer.", lower_bound=0, upper_bound=0.9
)
OPERANDS = flags.DEFINE_enum(
    "operands", "float32", list(transformer.DTYPES), "Of matrix products."
)
DEV_EVERY = flags.DEFINE_integer(
    "dev_every", 500, "Steps between looks at English dev.", lower_bound=1
)
SELECT = flags.DEFINE_enum(
    "select",
    "best",
    ["best", "last", "average"],
    "What is tested: the step of the best accuracy on English dev, the earliest of"
    " equals; the last one; or the mean of the parameters at all looks at English dev"
    " since the warm-up.",
)
EVAL_BATCH_SIZE = flags.DEFINE_integer(
    "eval_batch_size", 64, "Pairs at once where nothing is trained.", lower_bound=1
)
EVAL_ONLY = flags.DEFINE_bool(
    "eval_only", False, "Test what --run trained, on --data_dir; train nothing."
)
RUN = flags.DEFINE_string(
    "run",
    "",
    "The folder of a run to test with --eval_only, whose flags hold.",
    allow_override=True,  # experiments/translate.py has a flag of this name
)
EXPORT = flags.DEFINE_bool(
    "export",
    False,
    "Leave the fine-tuned encoder, all of its pieces, as a checkpoint folder in"
    " <run>/finetune/encoder; with --eval_only too.",
)
SPLIT = flags.DEFINE_enum("split", "test", ["dev", "test"], "What --eval_only tests.")
PREDICTIONS_DIR = flags.DEFINE_string(
    "predictions_dir",
    "",
    "Where --eval_only writes; if empty, <run>/evaluated/<split>-<digest of the text>.",
)

NAME = "finetune"
"""The cluster's folder in the run's; there is one."""
ENGLISH = "en"

# A run goes on only with the same of these.
AGREED = (
    *("steps", "batch_size", "seed", "encoder", "dataset", "max_train_pairs"),
    "max_test_pairs",
    *("trim_vocabulary", "freeze_embeddings", "pooling", "rate", "layer_decay"),
    *("warmup_share", "clip_gradient", "encoder_dropout", "classifier_dropout"),
    *("operands", "dev_every", "select"),
)


def check() -> None:
    """Raises FlagError at what cannot work."""
    capacities()
    languages()
    if EVAL_ONLY.value != bool(RUN.value):
        raise shared_flags.FlagError("--eval_only and --run=FOLDER go together")


def capacities() -> tuple[int, ...]:
    """--length_buckets, ascending."""
    text = ",".join(LENGTHS.value)
    if not all(part.strip().isdecimal() for part in LENGTHS.value):
        raise shared_flags.FlagError(
            f"--length_buckets={text}: expected numbers such as 32,64"
        )
    found = [int(part) for part in LENGTHS.value]
    if not found or found != sorted(set(found)) or found[0] < 6 or len(found) > 250:
        raise shared_flags.FlagError(
            f"--length_buckets={text}: must ascend, from 6 or more, at most 250 of them"
        )
    return tuple(found)


def languages() -> list[str]:
    """--languages."""
    found = LANGUAGES.value
    if not found or len(set(found)) != len(found) or not all(found):
        raise shared_flags.FlagError(
            f"--languages={','.join(found)}: expected codes such as en,sw, each once"
        )
    return found


def data_dir() -> pathlib.Path:
    """--data_dir."""
    if shared_flags.DATA_DIR.value.startswith("package:"):
        raise shared_flags.FlagError(
            "--data_dir=FOLDER with an nli/ is needed; no package has such pairs"
        )
    return pathlib.Path(shared_flags.DATA_DIR.value)


def tfds_dir() -> pathlib.Path | None:
    """--tfds_dir."""
    return pathlib.Path(TFDS_DIR.value) if TFDS_DIR.value else None


def own() -> dict[str, str]:
    """What a run goes on and is tested with only if it is as it was."""
    folder = _encoder_folder()
    return {
        "encoder": checkpoint_folder.digest(folder),
        "tokenizer": tokenizers.load(folder).digest,
    }


def _encoder_folder() -> pathlib.Path:
    prepared = pathlib.Path(shared_flags.PRETRAINED_DIR.value)
    return packages.checkpoint_of(ENCODER.value, prepared, lifecycle.say)


def load_encoder() -> tuple[pretrained.Pretrained, tokenizers.Tokenizer]:
    """--encoder and its tokenizer, brought if need be.

    Raises:
      NebulaError: if it is no checkpoint, or its tokenizer is another model's.
    """
    folder = _encoder_folder()
    model = pretrained.load(folder, dropout=ENCODER_DROPOUT.value, dtype=OPERANDS.value)
    words = tokenizers.load(folder)
    pretrained.check_tokenizer(model, words)
    longest = capacities()[-1]
    if model.config.max_length < longest:
        raise shared_flags.FlagError(
            f"--length_buckets ends with {longest}; {folder} has"
            f" {model.config.max_length} positions"
        )
    return model, words


def optimizer(layers: int) -> optax.GradientTransformation:
    """Adam, its rate rising and falling in straight lines, lower layers slower.

    Args:
      layers: of the encoder.
    """
    steps = shared_flags.STEPS.value
    schedule = optimizers.linear_decay(
        RATE.value, round(WARMUP_SHARE.value * steps), steps
    )
    return optax.chain(
        optimizers.adam(schedule, clip_norm=CLIP.value),
        optimizers.scale_by_layer(LAYER_DECAY.value, layers),
    )


def settings(text: str) -> dict[str, Any]:
    """What a checkpoint is checked against; `text` is a digest of the text."""
    values = {f"--{name}": flags.FLAGS[name].value for name in AGREED}
    return values | {
        "--length_buckets": ",".join(LENGTHS.value),
        "text": text,
    }


def is_judged(step: int) -> bool:
    """Whether English dev is looked at after `step`."""
    return step % DEV_EVERY.value == 0 or step == shared_flags.STEPS.value
