"""The losses of held-out sentences, in this process, against those of a whole batch."""

import functools

import jax
import numpy as np
import pytest
import tiny_translations

from experiments.abnet import data, evaluation, models
from nebula_jax.data import ragged_rows, tokenizers
from nebula_jax.evaluation import bleu, sentence_scores
from nebula_jax.models import abnet_params, transformer
from nebula_jax.training import abnet as abnet_training

SPECIAL = tokenizers.SpecialTokens(0, 1, 2, 3, 4, size=40)
WIDTH = 16
LENGTHS = (4, 7, 5, 12, 3, 9)  # of the target rows


def text(lengths):
    """A target side with rows of these lengths, and a sentence of each."""
    random = np.random.RandomState(0)
    rows = [[SPECIAL.cls, *random.randint(5, 40, n - 2), SPECIAL.sep] for n in lengths]
    ids = [f"held_out-{n:06d}" for n in range(len(rows))]
    joined = ragged_rows.join(ids, [np.asarray(row, np.int32) for row in rows], [], [])
    sentences = [" ".join(f"w{token}" for token in row) for row in rows]
    named = (ids, joined, sentences)
    return data.Text(None, *({evaluation.HELD_OUT: each} for each in named))


def configured(**values):
    given = {"length_buckets": "8,16", "batch_size": 4, "micro_batches": 2}
    return tiny_translations.run(**given | values).agreed


@functools.cache
def target(objective):
    """The task and the parameters of a target side."""
    agreed = configured(objective=objective, decoder_adapter_dim=8)
    shape = transformer.Config(40, 1, WIDTH, 2, 32, 16)
    translator = models.model(agreed, shape, shape)
    task = models.make_task(agreed, translator, SPECIAL)
    init = jax.jit(functools.partial(abnet_params.init_target, translator))
    return task, init(jax.random.key(0))


alone_of = jax.jit(abnet_training.held_out, static_argnums=0)


def received(index, lengths):
    """Hidden states as they come: padded to the longest bucket."""
    random = np.random.RandomState(1)
    hidden = random.randn(100, 16, WIDTH).astype(np.float32)[index]
    mask = np.arange(16) < np.asarray(lengths)[:, None]
    return {"hidden": hidden, "mask": mask, "index": np.asarray(index, np.int32)}


@pytest.mark.parametrize("objective", ["ar", "cmlm"])
@pytest.mark.parametrize("lengths", [(4, 8, 8, 2), (3, 16, 9, 8)])
def test_the_losses_of_a_batch_are_those_of_its_sentences_alone(objective, lengths):
    """In batches of two length buckets; the last row only fills the batch up."""
    task, params = target(objective)
    agreed = configured(objective=objective)
    batch = received([3, 1, 5, -1], lengths)
    side = text(LENGTHS)
    found = evaluation.decoder(agreed, task).losses(params, batch, side)
    assert found.keys() == {3, 1, 5}
    for place, number in enumerate((3, 1, 5)):
        alone = {name: leaf[place : place + 1] for name, leaf in batch.items()}
        rows = side.rows[evaluation.HELD_OUT].rows(
            np.asarray([number]), 16, SPECIAL.pad
        )
        nats, tokens = alone_of(task, params, alone, rows)
        assert found[number] == (pytest.approx(float(nats[0]), rel=1e-4), tokens[0])
    if objective == "ar":
        assert [found[n][1] for n in (1, 3, 5)] == [LENGTHS[n] - 1 for n in (1, 3, 5)]


def test_scores_are_in_the_order_of_the_examples_and_kept_beside_translations(tmp_path):
    side = text(LENGTHS)
    losses = {number: (float(number), number + 1) for number in reversed(range(6))}
    translations = [*side.sentences[evaluation.HELD_OUT][:-1], "nothing of it"]
    found = evaluation.scores_of(side, losses, translations, "13a")
    assert found.ids == side.ids[evaluation.HELD_OUT]
    assert found.nats.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    want = bleu.corpus_bleu(translations, side.sentences[evaluation.HELD_OUT]).score
    assert bleu.of_statistics(found.counts) == pytest.approx(want)
    assert sentence_scores.loss(found).mean == pytest.approx(15 / 21)
    path = evaluation.scores_path(tmp_path, 7)
    assert path == tmp_path / "held_out-00000007.scores.tsv"
    kept = sentence_scores.loads(sentence_scores.dumps(found))
    assert sentence_scores.are_paired(kept, found)


def test_held_out_pairs_are_a_test_set_of_which_all_are_translated():
    agreed = configured(bleu_sentences=2, steps=10)
    names = ("train", "dev", "test", evaluation.HELD_OUT)
    side = data.Text(None, {name: [] for name in names}, {}, {})
    assert evaluation.splits(agreed, side, 9) == ["dev"]
    assert evaluation.splits(agreed, side, 10) == ["dev", "test", evaluation.HELD_OUT]
    assert data.evaluation_indices(agreed, "test", 5).tolist() == [0, 1]
    every = data.evaluation_indices(agreed, evaluation.HELD_OUT, 5)
    assert every.tolist() == [0, 1, 2, 3, 4]
