"""A small masked language model that learns from teachers in other clusters.

    python -m experiments.distill --flagfile=experiments/flags/distill_tiny.flags \\
        --data_dir=FOLDER --vocabulary=FILE --teachers=FOLDER,FOLDER

starts a student and two teachers here; --clusters=3 has three teachers. A teacher is a
folder with the encoder, the tokenizer and the head of a masked language model, such as
pretrain_bert leaves one (runs/NAME/cluster-0/encoder), or hf:ORG/NAME@COMMIT. On real
clusters, of which the student's alone has text:

    ... --cluster=student --listen=0.0.0.0:7070 --tls=FOLDER
    ... --cluster=teacher:0 --peer=student.example:7070 --tls=FOLDER --teachers=FOLDER

All that crosses, at every step, B rows of L tokens with M slots for masked ones:

    question    student -> each teacher    masked ids [B, L], at ceil(log2 V) bits, and
                                           a bit for each place
    answer      teacher -> student         --top_k pieces [B, M, K], at as many bits,
                                           and their log-probabilities, by --codec

The student is a step ahead with its questions: teachers answer while it learns.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import nebula_jax as nebula
from experiments import configuration
from experiments.pretraining import hot_start
from experiments.pretraining import text as text_lib
from nebula_jax import errors, files
from nebula_jax.commands import fields
from nebula_jax.communication import codecs, ranks
from nebula_jax.data import language_mixture, resumable_batches, text_folder
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.face import checks
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import packages, trimming
from nebula_jax.runtime.life import process
from nebula_jax.training import bert, distillation, masking

WEIGHT_RATE = 0.05
"""Step size of learned weights: they settle in some hundred steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of student and teachers beside those of every run."""

    teachers: tuple[str, ...] = fields.to_begin_with(
        (),
        "Folders of the teachers, or hf:ORG/NAME@COMMIT, in their order; a teacher on a"
        " machine of its own may name itself alone, and the student needs none.",
    )
    teacher_weights: tuple[str, ...] = fields.of_training(
        (),
        "Weights of the teachers in their mixture, such as 2,1. If empty, they are"
        " learned: those by which the mixture predicts the student's text best.",
    )
    teacher_share: float = fields.of_training(
        0.5, "Share of the teachers in the loss; the rest is the text's.", upper=1.0
    )
    top_k: int = fields.of_line(
        16, "Most likely pieces that a teacher sends of a masked place.", lower=1
    )
    student_size: str = fields.of_model(
        "nano", "Size of the student.", choices=list(transformer.SIZES)
    )
    vocabulary: str
    languages: tuple[str, ...]
    mono_alpha: float
    max_length: int
    batch_size: int
    eval_batch_size: int
    eval_batches: int
    eval_every: int
    steps: int
    seed: int
    mask_rate: float
    mask_policy: str
    dropout: float
    dtype: str
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float

    def student(self, vocab_size: int) -> distillation.Config:
        """Returns the configuration of a student of so many pieces."""
        shape = transformer.config_of_size(
            self.student_size,
            vocab_size=vocab_size,
            max_length=self.max_length,
            dropout=self.dropout,
            dtype=self.dtype,
        )
        warmup = min(1.0, self.warmup_steps / self.steps)
        own = fields.common(self, bert.Config)
        rate = 0.0 if self.teacher_weights else WEIGHT_RATE
        model = bert.Config(encoder=shape, warmup=warmup, **own)
        return distillation.Config(model, self.teacher_share, rate)

    @property
    def slots(self) -> int:
        """The slots of a row for masked pieces, M."""
        return masking.capacity(self.mask_rate, self.max_length)

    def scores(self, teachers: int) -> jax.Array:
        """Returns the logarithms of the first weights, [T] float32.

        Raises:
          errors.SettingsError: if they are not one for each teacher, above 0.
        """
        given = ",".join(self.teacher_weights)
        try:
            weights = [float(each) for each in self.teacher_weights] or [1.0] * teachers
        except ValueError:
            weights = []
        is_positive = all(0 < each < math.inf for each in weights)
        if len(weights) != teachers or not is_positive:
            raise errors.SettingsError(
                f"teacher_weights={given}: expected {teachers} numbers above 0, one for"
                " each teacher"
            )
        logs = np.log(weights)  # float64, in which none becomes 0 or infinite
        return jnp.asarray(logs - logs.max(), jnp.float32)


OF_PLACE = ("data_dir", "prepared_dir", "pretrained_dir")
OWN = ("teachers", "vocabulary", *OF_PLACE)
"""Flags that may differ between clusters; of the vocabulary the digest is compared."""
NAMES = [*fields.define(Settings), *OF_PLACE]
for _name in NAMES:  # also those that other experiments have
    flags.declare_key_flag(_name)


def channels(settings: Settings, vocab_size: int, codec: str) -> tuple[Any, Any]:
    """Returns spec and codec of a question, and of an answer.

    Args:
      codec: of log-probabilities.

    Raises:
      errors.SettingsError: if the codec does not fit, or has a state: no checkpoint
        would have it, and a run that resumes would come to other numbers.
    """
    rows, length = settings.batch_size, settings.max_length
    question = distillation.Question(
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.ShapeDtypeStruct((rows, length), jnp.bool_),
    )
    shape = (rows, settings.slots, settings.top_k)
    answer = distillation.Answer(
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    pack = codecs.pack_ids(vocab_size)
    try:
        packed = codecs.chain(pack, codecs.from_string(codec))
        has_state = bool(jax.tree.leaves(jax.eval_shape(lambda: packed.init(answer))))
    except ValueError as error:
        raise errors.SettingsError(f"codec={codec}: {error}") from None
    if has_state:
        raise errors.SettingsError(
            f"codec={codec}: it keeps a state, which distill does not save; take one"
            " without, such as fp16 or int8(64)"
        )
    return (question, pack), (answer, packed)


def check_answer(answered: distillation.Answer) -> None:
    """Checks an answer that has arrived; its pieces are checked by their codec.

    Raises:
      ValueError: at a log-probability that is none.
    """
    if not bool(jnp.all(answered.log_probs < math.inf)):
        raise ValueError("a log-probability of it is NaN or infinite")


def to_ask(step: int, first: int, last: int) -> range:
    """Returns the steps whose questions cross in a step: the next one.

    Both sides know them. In the first step of a process it is that one too, since what
    was asked ahead before a resume is asked again.
    """
    return range(step + (step > first), min(step + 1, last) + 1)


def text_of(
    settings: Settings, place: configuration.Place, vocabulary: vocabularies.Vocabulary
) -> tuple[Any, list[tuple[str, np.ndarray]]]:
    """Prepares the text, in the batches that pretrain_bert would have of it alone.

    Returns:
      Number, from 0 -> [B, L] int32; language and [B, L] int32 of each held-out batch.
    """
    folder = text_lib.folder(place)
    if list(settings.languages) == [text_lib.ALL]:
        languages = text_folder.languages(folder)
    else:
        names = " ".join(settings.languages)
        groups = language_mixture.parse_groups(names, "languages", "student")
        languages = [name for group in groups for name in group]
    data = language_mixture.open_generator(
        folder,
        languages,
        {"mrtd": 1.0, "trtd": 0.0},
        language_mixture.SamplingExponents(settings.mono_alpha),
        vocabulary=vocabulary,
        max_length=settings.max_length,
        prepared_dir=place.prepared_dir,
    )
    language_mixture.check_known(data.held_out, process.message)
    size, length = settings.batch_size, settings.max_length
    seed = text_lib.seed_of(settings.seed, 0)
    held_out = [
        (language, batch)
        for language in languages
        for batch in resumable_batches.held_out_batches(
            data.held_out[language],
            settings.eval_batches,
            settings.eval_batch_size,
            length,
        )
    ]
    return resumable_batches.numbered(data.sources, size, length, seed), held_out


def teacher(
    name: str,
    settings: Settings,
    place: configuration.Place,
    vocabulary: vocabularies.Vocabulary,
) -> tuple[transformer.Config, Any]:
    """Reads a teacher, with its pieces in the order of the vocabulary.

    Returns:
      The shape of its encoder, and the parameters of a `masked_lm.MaskedLM`.

    Raises:
      errors.NebulaError: if it cannot be read, cannot predict masked pieces, or does
        not have every piece of the vocabulary.
    """
    folder = packages.resolve_checkpoint(name, place.pretrained_dir, process.message)
    model, tokenizer = pretrained.load_with_tokenizer(
        folder,
        settings.max_length,
        log=process.message,
        dtype=settings.dtype,
        dropout=0.0,
    )
    if "mlm_head" not in model.params:
        raise errors.SettingsError(
            f"teachers={name}: it has no head that predicts masked pieces; take a"
            " masked language model, such as pretrain_bert leaves one"
        )
    ids = {tokenizer.piece(number): number for number in range(tokenizer.size)}
    pieces = [vocabulary.piece(number) for number in range(vocabulary.size)]
    if missing := [each for each in pieces if each not in ids]:
        raise errors.SettingsError(
            f"teachers={name}: its tokenizer lacks {len(missing)} of {len(pieces)}"
            f" pieces of vocabulary={vocabulary.path}, such as {missing[0]}; all"
            " clusters share one vocabulary, of which each teacher has every piece"
        )
    model = trimming.select_rows(model, np.asarray([ids[each] for each in pieces]))
    parts = ("embeddings", "encoder", "mlm_head")
    return model.config, jax.tree.map(
        jnp.asarray, {part: model.params[part] for part in parts}
    )


def from_flags(run: nebula.Run) -> tuple[Settings, Any, vocabularies.Vocabulary]:
    """Returns the settings, the place, and the vocabulary, which all compare.

    Raises:
      errors.NebulaError: at what cannot work.
    """
    settings, place = fields.read(Settings), fields.read(configuration.Place)
    if ranks.count() > 1 or (flags.FLAGS.devices_per_cluster or 1) > 1:
        raise errors.SettingsError(
            "distill is for clusters of one process with one device each"
        )
    if not settings.vocabulary:
        raise errors.SettingsError(
            "vocabulary= is missing: the file that all clusters share, such as"
            " encoder/spiece.model of the run of a teacher"
        )
    vocabulary = vocabularies.load(pathlib.Path(settings.vocabulary))
    if settings.top_k > vocabulary.size:
        raise errors.SettingsError(
            f"top_k={settings.top_k}: the vocabulary has {vocabulary.size} pieces"
        )
    run.compare(vocabulary=vocabulary.digest[:16])
    return settings, place, vocabulary


def train_student(run: nebula.Run) -> None:
    """Trains the student to the end, and leaves its encoder."""
    settings, place, vocabulary = from_flags(run)
    batches, held_out = text_of(settings, place, vocabulary)
    names = run.clusters[1:]
    config = settings.student(vocabulary.size)
    begun, _ = bert.init(config.model, settings.seed)
    rng = jax.random.wrap_key_data(begun.rng)
    state = nebula.state(begun.params, config.model.transformation())
    scores = settings.scores(len(names))
    evaluated = evaluator(run, config.model, held_out)
    question, answer = channels(settings, vocabulary.size, run.codec)

    @functools.lru_cache(maxsize=2)  # of this step, and of the one that is asked ahead
    def masked(step: int) -> tuple[masking.Masked, distillation.Question]:
        number = np.int32(step)
        return distillation.masked(config.model, rng, number, batches[step - 1])

    with run.listen(*names) as found:
        links = found if len(names) > 1 else [found]
        asks = [each.sender("question", *question) for each in links]
        told = [each.receiver("answer", *answer, check=check_answer) for each in links]
        state, scores = run.restore(state, scores)
        first = run.context.step + 1
        for step, (rows, _) in run.batches(masked):
            if step == 1:
                evaluated(0, state.params)
            # Teachers answer the next question while this step is computed.
            for ahead in to_ask(step, first, settings.steps):
                for each in asks:
                    each.send(ahead, masked(ahead)[1])
            answers = [each.recv(step) for each in told]
            key = jax.random.fold_in(run.key, step)
            grads, scores, metrics = distillation.gradients(
                config, state.params, scores, rows, answers, key
            )
            state = state.apply(grads)
            # Before it is saved: who is killed between the two takes the step again.
            if step % settings.eval_every == 0 or step == settings.steps:
                evaluated(step, state.params)
            run.done(step, (state, scores), metrics)
    if run.context.step >= settings.steps:
        export(run, settings, config, vocabulary, state.params)


def train_teacher(run: nebula.Run) -> None:
    """Answers the student's questions to the end.

    Raises:
      checkpoint.CheckpointError: if another teacher answered before a stop.
    """
    settings, place, vocabulary = from_flags(run)
    count, names = len(run.clusters) - 1, settings.teachers
    if len(names) not in (1, count):
        raise errors.SettingsError(
            f"teachers={','.join(names)}: expected {count}, one for each teacher, or"
            " this one alone"
        )
    shape, params = teacher(
        names[run.index] if len(names) > 1 else names[0], settings, place, vocabulary
    )
    # A run that resumes has the teachers that it began with, wherever they lie now.
    digest = files.digest_of([shape, checks.digest(params)])
    run.saved.add_fingerprints({run.cluster: digest})
    question, answer = channels(settings, vocabulary.size, run.codec)
    answered = functools.partial(
        distillation.answer, shape, settings.slots, settings.top_k, params
    )
    with run.dial("student") as link:
        asks = link.receiver("question", *question)
        tells = link.sender("answer", *answer)
        run.restore(0)  # it has no state but the step
        first = run.context.step + 1
        for step in run.steps():
            for ahead in to_ask(step, first, settings.steps):
                tells.send(ahead, answered(asks.recv(ahead)))
            run.done(step, step)


def evaluator(
    run: nebula.Run, model: bert.Config, held_out: list[tuple[str, np.ndarray]]
) -> Callable[[int, Any], None]:
    """Returns what records the student's loss on held-out text after a step."""
    sums = jax.jit(functools.partial(bert.evaluate, model))

    def evaluated(step: int, params: Any) -> None:
        evaluate = functools.partial(sums, params)
        with run.context.evaluating():
            found = text_lib.masked_lm_figures(held_out, evaluate)
        run.context.record.evaluation(step, found)

    return evaluated


def export(
    run: nebula.Run,
    settings: Settings,
    config: distillation.Config,
    vocabulary: vocabularies.Vocabulary,
    params: Any,
) -> None:
    """Writes the student as pretrain_bert writes an encoder, unless it cannot."""
    if vocabulary.rows is not None:
        process.message(
            "no encoder is written: its pieces are of a pretrained tokenizer; the"
            " student is in its checkpoints"
        )
        return
    count = len(run.clusters) - 1
    about = f"It learned from {count} teacher{'s' * (count > 1)} for {settings.steps:,}"
    about += f" steps on text in {' '.join(settings.languages)}."
    params = jax.device_get(params)
    hot_start.write_own(run.folder, config.model.encoder, vocabulary, params, about)


if __name__ == "__main__":
    nebula.main(
        {"student": train_student, "teacher:*": train_teacher},
        defaults={"codec": "fp16", "mask_policy": "bert", "eval_batch_size": 32},
        own_flags=OWN,
    )
