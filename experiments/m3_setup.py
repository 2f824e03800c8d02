"""Flags of the M3 experiment, and what is made of them before a loop begins."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import flags

import nebula_jax
from experiments import clusters
from nebula_jax.communication import codecs, frames
from nebula_jax.data import batches, corpora, django_messages, masking, mixtures, vocab
from nebula_jax.evaluation import rtd
from nebula_jax.models import transformer
from nebula_jax.training import m3

GENERATORS = flags.DEFINE_string(
    "generators",
    "2",
    'Languages of each generator, as in "en de|hi ur"; or a number K, for the grouping'
    " of K generators in the text folder's mono/families.json.",
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
    "The sentencepiece model that all clusters share. If empty, --cluster=all and"
    " --cluster=whole train one on the text, of --vocab_size pieces.",
)
VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 8000, "Pieces of a vocabulary that is trained here.", lower_bound=32
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

HELD_BACK_SEED = 1_000_003

# Clusters must agree on these; the rest of the flags each may set as it likes.
AGREED = (
    *("steps", "batch_size", "seed", "window", "checkpoint_every"),
    *("generators", "tasks", "generator_size", "discriminator_size", "max_length"),
    *("dtype", "dropout", "mask_rate", "mask_policy", "rtd_weight", "clm_weight"),
    *("learning_rate", "warmup_steps", "weight_decay", "clip_norm"),
    *("eval_every", "eval_batches"),
)


def groups(data_dir: pathlib.Path | None) -> list[list[str]]:
    """Languages of each generator, from --generators.

    Args:
      data_dir: where a bare number is looked up; None on the discriminator, which has
        no text and must be told the languages.
    """
    text = GENERATORS.value.strip()
    if not text.isdigit():
        return mixtures.parse_groups(text)
    if data_dir is None:
        raise clusters.FlagError(
            f"--generators={text}: the discriminator has no text folder to look this"
            ' up in; write the groups out, as in --generators="en de|hi ur"'
        )
    return corpora.families(data_dir, int(text))


def written_out(found: list[list[str]]) -> str:
    """Groups as a flag value that needs no lookup."""
    return "|".join(" ".join(group) for group in found)


def text_folder() -> pathlib.Path:
    """--data_dir, after writing Django's messages out if those are asked for."""
    if not clusters.DATA_DIR.value.startswith("package:"):
        return pathlib.Path(clusters.DATA_DIR.value)
    if clusters.DATA_DIR.value != "package:django":
        raise clusters.FlagError(
            f"--data_dir={clusters.DATA_DIR.value}: the one package known is"
            " package:django"
        )
    folder = pathlib.Path(clusters.PREPARED_DIR.value) / "django_messages"
    if not (folder / "mono" / "families.json").is_file():  # written last
        with clusters.timed("writing Django's messages as a text folder"):
            django_messages.write_text_folder(folder)
    return folder


def check_text() -> list[list[str]]:
    """--generators and --tasks, checked against each other and the text folder."""
    data_dir = text_folder()
    corpora.check_folder(data_dir)
    found = groups(data_dir)
    mixtures.check_text(data_dir, found, mixtures.parse_tasks(TASKS.value, found))
    return found


def shared_vocabulary(found: list[list[str]]) -> pathlib.Path:
    """--vocabulary, or one trained on all of the run's text (once per text)."""
    if VOCABULARY.value:
        return pathlib.Path(VOCABULARY.value)
    data_dir = text_folder()
    languages = [language for group in found for language in group]
    limit, alpha = VOCAB_LINES.value, MONO_ALPHA.value
    texts = [corpora.mono_path(data_dir, name, "train") for name in languages]
    key = corpora.digest_of(
        [*map(corpora.digest, texts), VOCAB_SIZE.value, limit, alpha]
    )
    path = pathlib.Path(clusters.PREPARED_DIR.value) / f"vocabulary-{key}.model"
    if not path.is_file():
        with clusters.timed(f"training a vocabulary of {VOCAB_SIZE.value} pieces"):
            lines = mixtures.vocabulary_lines(data_dir, languages, alpha, limit)
            vocab.train(lines, VOCAB_SIZE.value, path)
    return path


def given_vocabulary() -> vocab.Vocabulary:
    """--vocabulary, which a cluster that runs alone must be given."""
    if not VOCABULARY.value:
        raise clusters.FlagError(
            f"--cluster={clusters.CLUSTER.value} needs --vocabulary, the file that all"
            " clusters share (python -m scripts.train_vocabulary makes one)"
        )
    return vocab.load(pathlib.Path(VOCABULARY.value))


class Text:
    """What one generator reads: an endless stream to train on, and held-back lines."""

    def __init__(self, groups, group, data: mixtures.GeneratorData, seed: int):
        self.groups = groups
        self._group = group
        self._data = data
        self.batches = batches.training_batches(
            data.sources, clusters.BATCH_SIZE.value, MAX_LENGTH.value, seed
        )

    def position(self) -> Any:
        """Where the stream is, as JSON values."""
        return self.batches.get_state()

    def go_to(self, position: Any) -> None:
        """Moves the stream to a saved position; None is the beginning."""
        if position is not None:
            self.batches.set_state(position)

    def held_back(self) -> Iterator[tuple[str, np.ndarray]]:
        """(language, [B, L] int32) in the order of `held_back_order`."""
        for language in self._group:
            for batch in batches.held_back_batches(
                self._data.held_back[language],
                EVAL_BATCHES.value,
                clusters.BATCH_SIZE.value,
                MAX_LENGTH.value,
            ):
                yield language, batch


def open_generator(index: int, vocabulary: vocab.Vocabulary) -> Text:
    """The text of generator `index`, prepared."""
    data_dir = text_folder()
    found = groups(data_dir)
    data = mixtures.open_generator(
        data_dir,
        found[index],
        mixtures.parse_tasks(TASKS.value, found)[index],
        mixtures.Alphas(MONO_ALPHA.value, PARALLEL_ALPHA.value),
        vocabulary=vocabulary,
        max_length=MAX_LENGTH.value,
        prepared_dir=pathlib.Path(clusters.PREPARED_DIR.value),
    )
    # Far enough apart that no two generators shuffle any two sources alike.
    seed = clusters.SEED.value + 1000 * (index + 1)
    return Text(found, found[index], data, seed)


def config(vocabulary: vocab.Vocabulary) -> m3.Config:
    """The flags as M3's configuration."""

    def model(size: str) -> transformer.Config:
        return transformer.config_of_size(
            size,
            vocab_size=vocabulary.size,
            max_length=MAX_LENGTH.value,
            dropout=DROPOUT.value,
            dtype=DTYPE.value,
        )

    return m3.Config(
        generator=model(GENERATOR_SIZE.value),
        discriminator=model(DISCRIMINATOR_SIZE.value),
        steps=clusters.STEPS.value,
        mask_rate=MASK_RATE.value,
        mask_policy=MASK_POLICY.value,
        rtd_weight=RTD_WEIGHT.value,
        clm_weight=CLM_WEIGHT.value,
        learning_rate=LEARNING_RATE.value,
        warmup_steps=WARMUP_STEPS.value,
        weight_decay=WEIGHT_DECAY.value,
        clip_norm=CLIP_NORM.value,
    )


def settings(vocabulary: vocab.Vocabulary, found: list[list[str]]) -> dict[str, Any]:
    """What a Hello compares, and a checkpoint is checked against."""
    values = {f"--{name}": flags.FLAGS[name].value for name in AGREED}
    values["--generators"] = written_out(found)
    values["vocabulary"] = vocabulary.digest[:16]
    return values


def hello(cluster: str, agreed: dict[str, Any], checkpoints: list[int]) -> frames.Hello:
    """This cluster's Hello."""
    return frames.Hello(cluster, nebula_jax.__version__, agreed, tuple(checkpoints))


def formula_bits(m3_config: m3.Config) -> float:
    """Bits per position that must cross: the id, one mark, and M/L originals."""
    bits = codecs.bits_for(m3_config.generator.vocab_size)
    return bits + 1 + bits * m3_config.capacity / m3_config.generator.max_length


def held_back_order(group: list[str]) -> list[str]:
    """The language of each held-back batch of a generator, in sending order."""
    return [language for language in group for _ in range(EVAL_BATCHES.value)]


def held_back_rng(micro_batch: int) -> jax.Array:
    """Held-back text is masked alike at every evaluation of every run."""
    return jax.random.key(HELD_BACK_SEED + micro_batch)


def is_evaluated(step: int) -> bool:
    """Whether held-back text is judged after `step`."""
    return step % EVAL_EVERY.value == 0 or step == clusters.STEPS.value


class Judged:
    """Judgements of one evaluation, by language."""

    def __init__(self):
        self._judgements: dict[str, list[m3.Judgement]] = {}

    def add(self, language: str, judgement: m3.Judgement) -> None:
        """Takes what was made of one batch."""
        found = self._judgements.setdefault(language, [])
        found.append(jax.device_get(judgement))

    def report(self) -> dict[str, dict[str, float]]:
        """Language -> figures (see `rtd.report`)."""
        return {name: rtd.report(found) for name, found in self._judgements.items()}
