"""The text that M3's discriminator has: token ids are the text.

N rows, L length, B rows of a batch.
"""

from typing import Any

import jax
import numpy as np

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.evaluation import leakage
from nebula_jax.models import transformer
from nebula_jax.training import m3, m3_predictions
from scripts.leaks import victim as victims

SIZE = "nano"  # of the generator: whatever it samples, the originals are sent


def recovered(rows: victims.Rows, chosen: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Restores the text from the Tokens that a generator sends of it.

    Args:
      rows: text.
      chosen: [B] int, rows of the batch.
      seed: of the masks and samples.

    Returns:
      codec; ratio, of the payload's bytes to ids of int32; masked, the share of tokens
      that were masked; corrupted and original, the shares of the corrupted and of the
      original text that are restored.
    """
    text, config = _as_m3(rows, chosen)
    state = jax.jit(m3.init_generator, static_argnums=0)(config, seed, 0)
    corrupt = jax.jit(m3_predictions.corrupt, static_argnums=0)
    tokens = corrupt(config, state.params, jax.random.key(seed + 1), text)
    codec = codecs.pack_ids(config.generator.vocab_size)
    payload, _ = codec.encode(tokens, ())
    arrived, _ = codec.decode(payload, ())
    restored = leakage.text_of(arrived)
    arrived, sent, restored = jax.device_get((arrived, tokens, restored))
    real = text != vocabularies.SPECIAL.pad
    return {
        "codec": codec.name,
        "ratio": codec_lib.nbytes(payload) / text.nbytes,
        "tokens": int(real.sum()),
        "masked": float(sent.masked.sum() / real.sum()),
        "corrupted": leakage.equal_share(arrived.input_ids, sent.input_ids, real),
        "original": leakage.equal_share(restored, text, real),
    }


def _as_m3(rows: victims.Rows, chosen: np.ndarray) -> tuple[np.ndarray, m3.Config]:
    """Numbers text as M3's vocabularies do: special pieces first, then text."""
    pieces, mask = rows.pieces[chosen], rows.mask[chosen]
    special = vocabularies.SPECIAL
    last = np.cumsum(mask, axis=1) == mask.sum(axis=1, keepdims=True)
    control = np.where(last, special.sep, special.unk)
    control[:, 0] = special.cls
    is_text = pieces != victims.NO_PIECE
    text = np.where(is_text, pieces + vocabularies.NUM_SPECIAL, control)
    text = np.where(mask, text, special.pad).astype(np.int32)
    model = transformer.config_of_size(
        SIZE,
        layers=1,
        vocab_size=vocabularies.NUM_SPECIAL + len(rows.candidates),
        max_length=rows.ids.shape[1],
    )
    return text, m3.Config(model, model, steps=1)
