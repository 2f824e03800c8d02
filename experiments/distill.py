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

import functools
import pathlib

import jax
import numpy as np
from absl import flags

import nebula_jax as nebula
from experiments import configuration
from experiments.students import channels, config, student, teacher
from nebula_jax import errors, files
from nebula_jax.commands import fields
from nebula_jax.communication import ranks
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.face import checks
from nebula_jax.training import bert, distillation, masking

OF_PLACE = ("data_dir", "prepared_dir", "pretrained_dir")
OWN = ("teachers", "vocabulary", *OF_PLACE)
"""Flags that may differ between clusters; of the vocabulary the digest is compared."""
for _name in (*fields.define(config.Settings), *OF_PLACE):  # others have some, too
    flags.declare_key_flag(_name)


def from_flags(
    run: nebula.Run,
) -> tuple[config.Settings, configuration.Place, vocabularies.Vocabulary]:
    """Returns the settings, the place, and the vocabulary, which all compare.

    Raises errors.NebulaError at what cannot work.
    """
    settings, place = fields.read(config.Settings), fields.read(configuration.Place)
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
    batches, held_out = student.text_of(settings, place, vocabulary)
    names = run.clusters[1:]
    made = settings.student(vocabulary.size)
    begun, _ = bert.init(made.model, settings.seed)
    rng = jax.random.wrap_key_data(begun.rng)
    state = nebula.state(begun.params, made.model.transformation())
    scores = settings.scores(len(names))
    evaluated = student.evaluator(run, made.model, held_out)
    question, answer = channels.specs(settings, vocabulary.size, run.codec)

    @functools.lru_cache(maxsize=2)  # of this step, and of the one that is asked ahead
    def masked(step: int) -> tuple[masking.Masked, distillation.Question]:
        number = np.int32(step)
        return distillation.masked(made.model, rng, number, batches[step - 1])

    with run.listen(*names) as found:
        links = found if len(names) > 1 else [found]
        asks = [each.sender("question", *question) for each in links]
        told = [
            each.receiver("answer", *answer, check=channels.check_answer)
            for each in links
        ]
        state, scores = run.restore(state, scores)
        first = run.context.step + 1
        for step, (rows, _) in run.batches(masked):
            if step == 1:
                evaluated(0, state.params)
            # Teachers answer the next question while this step is computed.
            for ahead in channels.to_ask(step, first, settings.steps):
                for each in asks:
                    each.send(ahead, masked(ahead)[1])
            answers = [each.recv(step) for each in told]
            key = jax.random.fold_in(run.key, step)
            grads, scores, metrics = distillation.gradients(
                made, state.params, scores, rows, answers, key
            )
            state = state.apply(grads)
            # Before it is saved: who is killed between the two takes the step again.
            if step % settings.eval_every == 0 or step == settings.steps:
                evaluated(step, state.params)
            run.done(step, (state, scores), metrics)
    if run.context.step >= settings.steps:
        student.export(run, settings, made, vocabulary, state.params)


def train_teacher(run: nebula.Run) -> None:
    """Answers the student's questions to the end.

    Raises checkpoint.CheckpointError if another teacher answered before a stop.
    """
    settings, place, vocabulary = from_flags(run)
    count, names = len(run.clusters) - 1, settings.teachers
    if len(names) not in (1, count):
        raise errors.SettingsError(
            f"teachers={','.join(names)}: expected {count}, one for each teacher, or"
            " this one alone"
        )
    shape, params = teacher.read(
        names[run.index] if len(names) > 1 else names[0], settings, place, vocabulary
    )
    # A run that resumes has the teachers that it began with, wherever they lie now.
    digest = files.digest_of([shape, checks.digest(params)])
    run.saved.add_fingerprints({run.cluster: digest})
    question, answer = channels.specs(settings, vocabulary.size, run.codec)
    answered = functools.partial(
        distillation.answer, shape, settings.slots, settings.top_k, params
    )
    with run.dial("student") as link:
        asks = link.receiver("question", *question)
        tells = link.sender("answer", *answer)
        run.restore(0)  # it has no state but the step
        first = run.context.step + 1
        for step in run.steps():
            for ahead in channels.to_ask(step, first, settings.steps):
                tells.send(ahead, answered(asks.recv(ahead)))
            run.done(step, step)


if __name__ == "__main__":
    nebula.main(
        {"student": train_student, "teacher:*": train_teacher},
        defaults={"codec": "fp16", "mask_policy": "bert", "eval_batch_size": 32},
        own_flags=OWN,
    )
