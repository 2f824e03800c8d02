"""Flags of the M3 experiment, and what clusters must agree on."""

import functools
import pathlib
from typing import Any

from absl import flags

import nebula_jax
from experiments import lifecycle, shared_flags
from nebula_jax.communication.wire import frames
from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import packages
from nebula_jax.training import masking

GENERATORS = flags.DEFINE_string(
    "generators",
    "2",
    'Languages of each generator, as in "en de|hi ur"; or a number K, for the grouping'
    " of K generators in the text folder's mono/families.json.",
)
WINDOW = flags.DEFINE_integer(
    "window", 2, "Steps that a generator may be ahead; 0 takes turns.", lower_bound=0
)
TASKS = flags.DEFINE_string(
    "tasks",
    "mrtd=1 trtd=1",
    "Task mix of every generator, or one for each, as in"
    ' "mrtd|trtd|mrtd=1 trtd=3": mrtd reads single languages, trtd translations.',
)
VOCABULARY = flags.DEFINE_string(
    "vocabulary",
    "",
    "The sentencepiece model that all clusters share, or with --hot_start the folder of"
    " its trimmed tokenizer. If empty, --cluster=all and --cluster=whole make one from"
    " the text, of --vocab_size pieces.",
)
VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size",
    8000,
    "Pieces of a vocabulary that is trained here; with --hot_start, as many of the"
    " tokenizer's pieces are kept, those that the text has most.",
    lower_bound=32,
)
VOCAB_LINES = flags.DEFINE_integer(
    "vocab_lines", 200_000, "Sentences to train it on, at most.", lower_bound=1
)
GENERATOR_SIZE = flags.DEFINE_enum(
    "generator_size", "tiny", list(transformer.SIZES), "Size of each generator."
)
DISCRIMINATOR_SIZE = flags.DEFINE_enum(
    "discriminator_size", "mini", list(transformer.SIZES), "Size of the discriminator."
)
HOT_START = flags.DEFINE_string(
    "hot_start",
    "",
    "The encoder that generators and discriminator begin with (section 4.1): a name of"
    " scripts/prepare_pretrained.py, or a checkpoint folder. If empty, random weights"
    " of --generator_size and --discriminator_size.",
)
GENERATOR_LAYERS = flags.DEFINE_integer(
    "generator_layers",
    0,
    "First layers of --hot_start in a generator; 0 for a quarter of them.",
    lower_bound=0,
)
DISCRIMINATOR_LAYERS = flags.DEFINE_integer(
    "discriminator_layers",
    0,
    "First layers of --hot_start in the discriminator; 0 for all.",
    lower_bound=0,
)
TEMPERATURE = flags.DEFINE_float(
    "temperature",
    1.0,
    "Of the generators' samples. Where a generator guesses well and so makes few fakes,"
    " above 1 it makes more; below 1 fakes are harder to tell.",
    lower_bound=0.01,
)
MAX_LENGTH = flags.DEFINE_integer(
    "max_length", 64, "Tokens of a sequence.", lower_bound=8
)
DTYPE = flags.DEFINE_enum(
    "dtype", "float32", list(transformer.DTYPES), "Operands of matrix products."
)
DROPOUT = flags.DEFINE_float(
    "dropout", 0.1, "Dropout rate.", lower_bound=0.0, upper_bound=0.9
)
MASK_RATE = flags.DEFINE_float(
    "mask_rate", 0.15, "Share of tokens masked.", lower_bound=0.01, upper_bound=0.9
)
MASK_POLICY = flags.DEFINE_enum(
    "mask_policy",
    "electra",
    list(masking.POLICIES),
    "What stands at masked positions: mask (always [MASK]), electra (15 % kept), bert"
    " (10 % random, 10 % kept).",
)
RTD_WEIGHT = flags.DEFINE_float("rtd_weight", 50.0, "λ of eq. 11.", lower_bound=0.0)
CLM_WEIGHT = flags.DEFINE_float("clm_weight", 1.0, "γ of eq. 11.", lower_bound=0.0)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-4, "Peak.", lower_bound=0.0)
WARMUP_STEPS = flags.DEFINE_integer(
    "warmup_steps", 10_000, "Steps to the peak.", lower_bound=0
)
WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.0, "Decoupled.", lower_bound=0.0)
CLIP_NORM = flags.DEFINE_float(
    "clip_norm", 1.0, "Of each model's gradient; 0 for none.", lower_bound=0.0
)
MONO_ALPHA = flags.DEFINE_float(
    "mono_alpha", 0.3, "Sampling exponent of single languages.", lower_bound=0.0
)
PARALLEL_ALPHA = flags.DEFINE_float(
    "parallel_alpha", 0.7, "Sampling exponent of translations.", lower_bound=0.0
)
EVAL_EVERY = flags.DEFINE_integer(
    "eval_every", 500, "Steps between evaluations on held-back text.", lower_bound=1
)
EVAL_BATCHES = flags.DEFINE_integer(
    "eval_batches", 2, "Held-back batches per language.", lower_bound=1
)

# Clusters must agree on these; the rest of the flags each may set as it likes. Runs
# saved before there was a flag of AGREED_IF_SET go on where it has its default.
AGREED_IF_SET = ("temperature", "generator_layers", "discriminator_layers")
AGREED = (
    *("steps", "batch_size", "seed", "window", "checkpoint_every"),
    *("generators", "tasks", "generator_size", "discriminator_size", "max_length"),
    *("dtype", "dropout", "mask_rate", "mask_policy", "rtd_weight", "clm_weight"),
    *("learning_rate", "warmup_steps", "weight_decay", "clip_norm"),
    *("eval_every", "eval_batches"),
)


def hot_start_folder() -> pathlib.Path:
    """The checkpoint folder of --hot_start, brought if need be.

    Raises:
      NebulaError: if it cannot be had.
    """
    return _folder(HOT_START.value, shared_flags.PRETRAINED_DIR.value)


@functools.cache  # a package's files are hashed each time: half a gigabyte
def _folder(name: str, pretrained_dir: str) -> pathlib.Path:
    return packages.checkpoint_of(name, pathlib.Path(pretrained_dir), lifecycle.say)


_digest = functools.cache(checkpoint_folder.digest)


def settings(
    vocabulary: vocabularies.Vocabulary, owners: list[list[str]]
) -> dict[str, Any]:
    """What a Hello compares, and a checkpoint is checked against."""
    values = {f"--{name}": flags.FLAGS[name].value for name in AGREED}
    values["--generators"] = language_mixture.write_groups(owners)
    values["vocabulary"] = vocabulary.digest[:16]
    for name in AGREED_IF_SET:
        if flags.FLAGS[name].value != flags.FLAGS[name].default:
            values[f"--{name}"] = flags.FLAGS[name].value
    if HOT_START.value:
        # Clusters may have it in different places.
        values["--hot_start"] = _digest(hot_start_folder())[:16]
    return values


def hello(cluster: str, agreed: dict[str, Any], checkpoints: list[int]) -> frames.Hello:
    """This cluster's Hello."""
    return frames.Hello(cluster, nebula_jax.__version__, agreed, tuple(checkpoints))


def is_evaluated(step: int) -> bool:
    """Whether held-back text is judged after `step`."""
    return step % EVAL_EVERY.value == 0 or step == shared_flags.STEPS.value
