"""Translation of dev and test sets: the source side encodes, the target side decodes.

The source side sends H^E of the sentences; the target side translates them, compares
the translations with its own sentences and keeps them in the run's folder. Held-out
pairs are one more test set, of which the target side also computes the loss of each
sentence, from the hidden states that are sent for translation: it is the loss that the
codecs leave, in whatever cluster the source side is.

B batch, M micro-batches, L length of the longest bucket, l length of a batch's bucket,
D width of PLM-S, Q longest target row.
"""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.abnet import config, data
from nebula_jax import files
from nebula_jax.communication import channels, ranks
from nebula_jax.communication.wire import session
from nebula_jax.data import split_parallel
from nebula_jax.evaluation import abnet_translate, bleu, decoding, sentence_scores
from nebula_jax.models import abnet
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import run_folder
from nebula_jax.training import abnet as abnet_training

Hidden = dict[str, jax.Array]
"""A batch as it crosses: `hidden` [B, L, D] float32, `mask` [B, L] bool, `index` [B]
int32, -1 in rows that only fill the batch up; with `cmlm` also `length_logits`
[B, L + 1] int32, the bits of float32."""
HELD_OUT = split_parallel.HELD_OUT
Losses = dict[int, tuple[float, int]]
"""Number of an example -> its loss in nats, and the tokens that this is of."""


class Decoder(NamedTuple):
    """The target side's part of an evaluation."""

    translate: Callable[[Any, Hidden], jax.Array]  # (params, Hidden) -> [B, Q] int32
    losses: Callable[[Any, Hidden, data.Text], Losses]  # of held-out sentences


def splits(agreed: config.Agreed, text: data.Text, step: int) -> list[str]:
    """Returns what is translated after `step`: dev, at the end the test sets too."""
    if step < agreed.steps:
        return ["dev"]
    return [name for name in text.ids if name != "train"]


def encoder(
    agreed: config.Agreed, task: abnet_training.Task
) -> Callable[[Any, np.ndarray, np.ndarray], Hidden]:
    """Returns a jitted (parameters, ids [B, l] int32, index [B] int32) -> Hidden."""
    pad, longest = task.source_controls.pad, agreed.length_buckets[-1]

    @jax.jit
    def encode(params: Any, input_ids: jax.Array, index: jax.Array) -> Hidden:
        mask = input_ids != pad
        encoded = abnet.encode(task.config, params, input_ids, mask)
        missing = longest - input_ids.shape[1]
        hidden = {
            "hidden": jnp.pad(encoded.hidden, ((0, 0), (0, missing), (0, 0))),
            "mask": jnp.pad(mask, ((0, 0), (0, missing))),
            "index": index,
        }
        if encoded.length_logits is not None:
            bits = jax.lax.bitcast_convert_type(encoded.length_logits, jnp.int32)
            hidden["length_logits"] = bits
        return hidden

    return encode


def send(
    agreed: config.Agreed,
    text: data.Text,
    encode: Callable[[Any, np.ndarray, np.ndarray], Hidden],
    params: Any,
    step: int,
    end: channels.Sender,
) -> None:
    """Sends the hidden states of the sentences that are translated after `step`."""
    numbers = itertools.count()
    for split in splits(agreed, text, step):
        rows = text.rows[split]
        indices = data.evaluation_indices(agreed, split, len(rows))
        for batch in data.evaluation_batches(agreed, rows, indices):
            length = agreed.length_buckets[batch.bucket]
            index = indices[batch.indices].astype(np.int32)
            ids = rows.rows(index, length, text.tokenizer.special.pad)
            index[batch.count :] = -1  # they only fill the batch up
            end.send(step, encode(params, ids, index), next(numbers))


def translate(
    agreed: config.Agreed,
    task: abnet_training.Task,
    params: Any,
    encoded: abnet.Encoded,
    mask: jax.Array,
) -> decoding.Translations:
    """Translates by beam search or mask-predict, as the objective is; to be jitted.

    `encoded` has hidden states [B, l, D] and length logits; `mask`, [B, l] bool, is
    false at padding.
    """
    arguments = (task.config, params, encoded, mask, task.target_controls)
    if agreed.objective == "ar":
        return abnet_translate.by_beam_search(*arguments, beams=agreed.beams)
    return abnet_translate.by_mask_predict(
        *arguments, candidates=agreed.beams, iterations=agreed.iterations
    )


def decoder(agreed: config.Agreed, task: abnet_training.Task) -> Decoder:
    """Returns functions of a batch of hidden states."""

    def of_length(params: Any, received: Hidden, length: int) -> jax.Array:
        bits = received.get("length_logits")
        logits = (
            None if bits is None else jax.lax.bitcast_convert_type(bits, jnp.float32)
        )
        encoded = abnet.Encoded(received["hidden"][:, :length], logits)
        mask = received["mask"][:, :length]
        return translate(agreed, task, params, encoded, mask).ids

    jitted = jax.jit(of_length, static_argnums=2)

    def decode_batch(params: Any, received: Hidden) -> jax.Array:
        lengths = np.asarray(received["mask"]).sum(axis=1)
        return jitted(params, received, data.bucket_length(agreed, lengths))

    return Decoder(decode_batch, _losses(agreed, task))


def _losses(
    agreed: config.Agreed, task: abnet_training.Task
) -> Callable[[Any, Hidden, data.Text], Losses]:
    """Returns a function that computes the losses of a batch of held-out sentences."""
    parts = agreed.micro_batches  # one after the other: the memory of a training step

    def of_length(
        params: Any, received: Hidden, ids: jax.Array, length: int
    ) -> tuple[jax.Array, jax.Array]:
        hidden = {
            "hidden": received["hidden"][:, :length],
            "mask": received["mask"][:, :length],
            "index": received["index"],
        }
        found = jax.lax.map(
            lambda part: abnet_training.held_out(task, params, *part),
            jax.tree.map(
                lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), (hidden, ids)
            ),
        )
        return jax.tree.map(lambda leaf: leaf.reshape(-1), found)

    jitted = jax.jit(of_length, static_argnums=3)

    def of_batch(params: Any, received: Hidden, text: data.Text) -> Losses:
        index, rows = np.asarray(received["index"]), text.rows[HELD_OUT]
        examples = np.maximum(index, 0)  # -1 where a row only fills the batch up
        columns = data.bucket_length(agreed, rows.lengths[examples])
        ids = rows.rows(examples, columns, task.target_controls.pad)
        lengths = np.asarray(received["mask"]).sum(axis=1)
        length = data.bucket_length(agreed, lengths)
        found = ranks.everywhere(jitted(params, dict(received), ids, length))
        each = zip(index.tolist(), *(np.asarray(part) for part in found), strict=True)
        return {
            number: (float(nats), int(tokens))
            for number, nats, tokens in each
            if number >= 0
        }

    return of_batch


def scores_of(
    text: data.Text, losses: Losses, translations: Sequence[str], tokenize: str
) -> sentence_scores.Scores:
    """Returns the scores of held-out sentences; `tokenize`: see `bleu.tokenizer_of`."""
    ids = text.ids[HELD_OUT]
    nats, tokens = zip(*(losses[number] for number in range(len(ids))), strict=True)
    references = text.sentences[HELD_OUT]
    counts = bleu.statistics(translations, references, tokenize=tokenize)
    return sentence_scores.Scores(ids, np.asarray(nats), np.asarray(tokens), counts)


def scores_path(translations: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the file of the scores after the last step, beside the translations."""
    return translations / f"{HELD_OUT}-{step:08d}.scores.tsv"


def evaluate(
    run: config.Run,
    text: data.Text,
    decode: Decoder,
    params: Any,
    step: int,
    end: channels.Receiver,
) -> dict[str, dict[str, float]]:
    """Translates what `send` sends, and compares it with the target side's sentences.

    The translations are written to the target cluster's folder, and the scores of each
    held-out sentence. Returns split -> {"bleu", "ceiling", "sentences"}; of held-out
    pairs also "loss" (nats a token), its "standard_error" and the "tokens" that were
    predicted. Raises session.RemoteProtocolError if the source sends other sentences.
    """
    numbers = itertools.count()
    words = bleu.tokenizer_of(config.languages(run.agreed.pair)[1])
    found = {}
    for split in splits(run.agreed, text, step):
        wanted = len(data.evaluation_indices(run.agreed, split, len(text.ids[split])))
        translations: dict[int, str] = {}
        losses: Losses = {}
        while len(translations) < wanted:
            hidden = end.recv(step, next(numbers))
            ids = np.asarray(ranks.everywhere(decode.translate(params, hidden)))
            new = _sentences(text, hidden["index"], ids)
            if not new or not new.keys() <= set(range(wanted)) - translations.keys():
                raise session.RemoteProtocolError(
                    f"source sent other sentences of {split} than this side has"
                )
            translations |= new
            if split == HELD_OUT:
                losses |= decode.losses(params, hidden, text)
        hypotheses = [translations[index] for index in range(wanted)]
        references = text.sentences[split][:wanted]
        score = bleu.corpus_bleu(hypotheses, references, tokenize=words)
        found[split] = {"bleu": score.score, "sentences": float(wanted)}
        found[split]["ceiling"] = _ceiling(text, references, words)
        if ranks.is_root():
            _write(run, split, step, hypotheses, score)
        if split == HELD_OUT:
            scores = scores_of(text, losses, hypotheses, words)
            loss = sentence_scores.loss(scores)
            found[split] |= {
                "loss": loss.mean,
                "standard_error": loss.standard_error,
                "tokens": float(scores.tokens.sum()),
            }
            if ranks.is_root():
                with files.writing(scores_path(_folder(run), step)) as partial:
                    partial.write_text(sentence_scores.dumps(scores), "utf-8")
    return found


def _ceiling(text: data.Text, references: Sequence[str], tokenize: str) -> float:
    """Returns the BLEU of the references themselves, in the target model's pieces."""
    pieces = text.tokenizer.encode_batch(references)
    perfect = [text.tokenizer.decode(each) for each in pieces]
    return bleu.corpus_bleu(perfect, references, tokenize=tokenize).score


def _sentences(text: data.Text, index: jax.Array, ids: np.ndarray) -> dict[int, str]:
    """Returns number of an example -> its translation."""
    return {
        int(number): text.tokenizer.decode(row)
        for number, row in zip(np.asarray(index), ids, strict=True)
        if number >= 0
    }


def _write(
    run: config.Run, name: str, step: int, sentences: Sequence[str], score: bleu.Bleu
) -> None:
    process.message(f"target: step {step}, {name}: {score}")
    folder = _folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{sentence}\n" for sentence in sentences)
    (folder / f"{name}-{step:08d}.txt").write_text(lines, "utf-8")


def _folder(run: config.Run) -> pathlib.Path:
    return run_folder.of_cluster(run.local.workdir, "target") / "translations"
