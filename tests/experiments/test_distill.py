"""Distillation over clusters: what they compute is what one process computes."""

import concurrent.futures
import contextlib
import json
import math
import signal

import jax
import numpy as np
import ports
import pytest
import tiny_runs
import trees
from absl import flags
from absl.testing import flagsaver

import nebula_jax as nebula
from experiments import configuration, distill
from experiments.pretraining import hot_start
from experiments.students import channels, config, student, teacher
from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained, transformer
from nebula_jax.training import bert, checkpoint, distillation, masking, metrics
from scripts.tables import config as tables_config

STEPS, LENGTH, ROWS, TOP = 24, 16, 4, 5
CLUSTERS = ("student", "teacher-0", "teacher-1")


class Runs(tiny_runs.Runs):
    """Runs of distill, with two teachers of random weights."""

    module = "experiments.distill"

    def __init__(self, folder):
        super().__init__(folder)
        lines = language_mixture.vocabulary_lines(self.text, ["en", "de"], 0.3, 1000)
        vocabularies.train(lines, 120, folder / "shared.model")
        self.vocabulary = vocabularies.load(folder / "shared.model")
        shape = transformer.Config(self.vocabulary.size, 1, 16, 2, 32, LENGTH)
        self.teachers = [folder / f"teacher{k}" for k in range(2)]
        for seed, each in enumerate(self.teachers):
            params = bert.init(bert.Config(shape, steps=1), seed)[0].params
            # Opinions, in place of what is nearly uniform.
            params["mlm_head"]["bias"] += np.random.default_rng(seed).normal(
                size=self.vocabulary.size
            )
            hot_start.write_own(each, shape, self.vocabulary, params, "A test's.")

    def flags(self):
        return {
            **{"data_dir": self.text, "prepared_dir": self.folder / "prepared"},
            **{"vocabulary": self.vocabulary.path, "languages": "en de"},
            "teachers": ",".join(f"{each}/encoder" for each in self.teachers),
            **{"steps": STEPS, "checkpoint_every": 4, "log_every": 4},
            **{"max_length": LENGTH, "batch_size": ROWS, "dropout": 0.1},
            **{"learning_rate": 1e-3, "warmup_steps": 2, "top_k": TOP},
            **{"eval_batch_size": 4, "eval_batches": 1, "eval_every": 20},
            **{"codec": "fp16", "mask_policy": "bert", "devices_per_cluster": 1},
        }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that share text, vocabulary and teachers."""
    return Runs(tmp_path_factory.mktemp("distill"))


def given(runs, **more):
    """Settings and place, as the command has them."""
    with as_flags(runs, **more):
        return fields.read(config.Settings), fields.read(configuration.Place)


@contextlib.contextmanager
def as_flags(runs, **more):
    assert nebula.main  # it defines the flags of every run
    values = runs.flags() | more
    flags.FLAGS(["test"])
    with flagsaver.flagsaver():
        flags.FLAGS(["test", *(f"--{name}={each}" for name, each in values.items())])
        yield


def reference(runs):
    """Trains the student in this process; its state, and its teachers' scores."""
    settings, place = given(runs)
    vocabulary = runs.vocabulary
    batches, _ = student.text_of(settings, place, vocabulary)
    made = settings.student(vocabulary.size)
    codec = nebula.codecs.fp16()
    slots = masking.capacity(settings.mask_rate, LENGTH)
    teachers = [
        teacher.read(name, settings, place, vocabulary) for name in settings.teachers
    ]
    begun, _ = bert.init(made.model, settings.seed)
    rng = jax.random.wrap_key_data(begun.rng)
    state = nebula.state(begun.params, made.model.transformation())
    scores = settings.scores(2)

    @jax.jit
    def crossed(answered):
        return codec.decode(codec.encode(answered, ())[0], ())[0]

    for step in range(1, STEPS + 1):
        batch = batches[step - 1]
        rows, asked = distillation.masked(made.model, rng, np.int32(step), batch)
        answers = [
            crossed(distillation.answer(shape, slots, TOP, params, asked))
            for shape, params in teachers
        ]
        key = jax.random.fold_in(jax.random.key(settings.seed), step)
        grads, scores, _ = distillation.gradients(
            made, state.params, scores, rows, answers, key
        )
        state = state.apply(grads)
    return state, scores


@pytest.mark.slow
def test_clusters_train_the_student_of_one_process_bit_for_bit(runs):
    """Each is a thread here, and all else is as in processes."""
    names = ("student", "teacher:0", "teacher:1")
    at = f"127.0.0.1:{ports.free_port()}"
    folder = runs.folder / "threads"

    def train(name):
        way = {"listen" if name == "student" else "peer": at, "tls": "off"}
        about = {"workdir": folder, "codec": "fp16", "log_every": 4}
        with nebula.Run(name, names, steps=STEPS, **about, **way) as run:
            role = distill.train_student
            if name != "student":
                role = distill.train_teacher
            role(run)
            return run.exit_status()

    with as_flags(runs), concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(train, names)) == [0, 0, 0]
    saved = runs.state("threads", "student", STEPS)
    found = [saved[name] for name in sorted(saved)]
    trees.assert_same(found, jax.tree.leaves(reference(runs)))
    assert np.ptp(found[-1]) > 0.01  # the weights were learned

    summary = json.loads((folder / "student" / "summary.json").read_text())
    assert_nothing_else_crosses(summary, runs.vocabulary.size)
    losses = [
        sum(each["held_out_mlm_loss"].values())
        for each in metrics.read(folder / "student")
        if "held_out_mlm_loss" in each
    ]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    left = pretrained.load(folder / "student" / "encoder")
    assert "mlm_head" in left.params

    others = ",".join(f"{each}/encoder" for each in reversed(runs.teachers))
    said = "holds a run with teacher:0="
    with (
        as_flags(runs, teachers=others),
        pytest.raises(checkpoint.CheckpointError, match=said),
    ):
        train("teacher:0")


@pytest.mark.slow
def test_a_kill_and_a_stop_change_no_bit(runs):
    """The student has asked for one more answer by then."""
    slow = {"wan": "20mbit,20ms"}  # so that it has not ended before
    run, family = runs.start_and_wait("split", 4, CLUSTERS, **slow)
    family["student"].kill()
    assert "student was killed by SIGKILL" in run.communicate(timeout=60)[0]
    run, family = runs.start_and_wait("split", 8, CLUSTERS, **slow)
    family["teacher:1"].terminate()
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 128 + signal.SIGTERM, output
    saved = [runs.folder / "split" / each / "checkpoints" for each in CLUSTERS]
    (step,) = set(map(tiny_runs.newest, saved))
    assert f"going on after step {step}" in runs.finished(workdir="split")
    found = runs.state("split", "student", STEPS)
    found = [found[name] for name in sorted(found)]
    trees.assert_same(found, jax.tree.leaves(reference(runs)))


def assert_nothing_else_crosses(student, vocab_size):
    """Masked ids and their places; K pieces a slot, and 2 bytes of each."""
    bits = math.ceil(math.log2(vocab_size))
    slots = ROWS * masking.capacity(0.15, LENGTH) * TOP
    sizes = {
        "sent question": math.ceil(ROWS * LENGTH * bits / 8) + ROWS * LENGTH // 8,
        "received answer": math.ceil(slots * bits / 8) + 2 * slots,
    }
    for ledger in student["ledger"].values():
        for kind, size in sizes.items():
            (found,) = (each for name, each in ledger.items() if name.startswith(kind))
            head = found[1] / found[0] - size
            assert 0 < head < 80, (kind, found, size)


def test_teachers_have_every_piece_of_the_vocabulary_and_a_head(runs, tmp_path):
    settings, place = given(runs)
    lines = language_mixture.vocabulary_lines(runs.text, ["sw"], 0.3, 1000)
    vocabularies.train(lines, 60, tmp_path / "other.model")
    other = vocabularies.load(tmp_path / "other.model")
    with pytest.raises(errors.SettingsError, match=r"its tokenizer lacks .* pieces of"):
        teacher.read(settings.teachers[0], settings, place, other)
    shape = transformer.Config(runs.vocabulary.size, 1, 16, 2, 32, LENGTH)
    params = dict(bert.init(bert.Config(shape, steps=1), 0)[0].params)
    del params["mlm_head"]
    hot_start.write_own(tmp_path, shape, runs.vocabulary, params, "A test's.")
    with pytest.raises(errors.SettingsError, match="no head that predicts masked"):
        teacher.read(f"{tmp_path}/encoder", settings, place, runs.vocabulary)


def test_pieces_of_a_teacher_may_be_in_another_order(runs):
    """As those of a pretrained tokenizer whose special pieces are not the first."""
    settings, place = given(runs)
    order = np.random.default_rng(0).permutation(runs.vocabulary.size)
    mixed = runs.vocabulary._replace(
        piece=lambda number: runs.vocabulary.piece(int(order[number]))
    )
    found, wanted = (
        teacher.read(settings.teachers[0], settings, place, each)[1]["mlm_head"]
        for each in (mixed, runs.vocabulary)
    )
    np.testing.assert_array_equal(found["bias"], wanted["bias"][order])


@pytest.mark.parametrize("weights", ["1", "1,0", "1,x", "1,nan"])
def test_weights_are_positive_numbers_one_for_each_teacher(runs, weights):
    settings, _ = given(runs, teacher_weights=weights)
    with pytest.raises(errors.SettingsError, match="expected 2 numbers above 0"):
        settings.scores(2)
    settings, _ = given(runs, teacher_weights="1,3")
    np.testing.assert_allclose(jax.nn.softmax(settings.scores(2)), [0.25, 0.75])
    settings, _ = given(runs, teacher_weights="1e-60,1e-60")
    np.testing.assert_allclose(jax.nn.softmax(settings.scores(2)), [0.5, 0.5])


@pytest.mark.parametrize(
    ("codec", "words"),
    [("error_feedback(int8(64))", "keeps a state"), ("pack_tokens|fp16", "codec=pack")],
)
def test_a_codec_that_does_not_fit_is_an_error_in_words(runs, codec, words):
    settings, _ = given(runs)
    with pytest.raises(errors.SettingsError, match=words):
        channels.specs(settings, 120, codec)


def test_an_answer_has_log_probabilities():
    pieces = np.zeros((1, 1, 2), np.int32)
    good = distillation.Answer(pieces, np.asarray([[[-1.0, -np.inf]]], np.float32))
    channels.check_answer(good)
    bad = good._replace(log_probs=np.asarray([[[-1.0, np.nan]]], np.float32))
    with pytest.raises(ValueError, match="NaN"):
        channels.check_answer(bad)


def test_languages_are_checked(runs):
    settings, place = given(runs, languages="en en")
    with pytest.raises(errors.NebulaError, match="'en' comes twice"):
        student.text_of(settings, place, runs.vocabulary)


def test_its_flagfile_is_a_student_that_learns_weights(runs):
    settings, _ = given(
        runs, flagfile=tables_config.FOLDER / "flags" / "distill_tiny.flags"
    )
    made = settings.student(4000)
    assert (made.weight_rate, made.share) == (config.WEIGHT_RATE, 0.5)
    assert made.model.encoder.dtype == "bfloat16"
