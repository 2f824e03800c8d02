"""The text of an ABNet run: each cluster's own side, and what both must agree on."""

import hmac
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import lifecycle, shared_flags
from experiments.abnet import config as abnet_config
from nebula_jax.communication import bridge
from nebula_jax.communication.wire import frames
from nebula_jax.data import (
    example_alignment,
    length_buckets,
    parallel_side,
    ragged_rows,
    text_folder,
    tokenizers,
)

PAIR = flags.DEFINE_string("pair", "es-en", "Languages of source and target.")
SOURCES = flags.DEFINE_list(
    "pair_sources",
    [],
    "What the column `source` of training pairs may say; empty for all of them.",
)
MAX_PAIRS = flags.DEFINE_integer(
    "max_pairs", None, "Training pairs at most; all if not given.", lower_bound=1
)
MAX_WORDS = flags.DEFINE_integer(
    "max_words",
    None,
    "Words at most, between spaces, of both sentences of a pair, in dev and test too;"
    " then the FLORES test, whose sentences are long, is left out.",
    lower_bound=1,
)
TEXT = flags.DEFINE_string(
    "text",
    "",
    "The folder of this cluster's own side, as scripts/split_parallel.py makes it. If"
    " empty, --cluster=all and --cluster=whole make both of --data_dir.",
)
ID_KEY = flags.DEFINE_string(
    "id_key",
    "",
    "A file with a secret of both sides, under which example ids are compared, and text"
    " and models of a run that goes on; without one, who knows the run's flags can tell"
    " whether an id is among them. A run keeps to its key.",
)


class Text(NamedTuple):
    """One side of the corpus, tokenised."""

    words: tokenizers.Tokenizer
    ids: dict[str, list[str]]
    """Split -> ids of its examples, in order."""
    rows: dict[str, ragged_rows.TokenRows]
    """Split -> its sentences, [CLS] and [SEP] included, in the order of their ids."""
    texts: dict[str, list[str]]
    """Split -> the same as text; of dev and the tests only."""


def languages() -> tuple[str, str]:
    """--pair."""
    found = tuple(PAIR.value.split("-"))
    if len(found) != 2 or not all(found):
        raise shared_flags.FlagError(
            f"--pair={PAIR.value}: expected two, such as es-en"
        )
    return found


def split() -> tuple[pathlib.Path, pathlib.Path]:
    """Makes the two sides of --data_dir, each with its own language alone."""
    made_of = [PAIR.value, shared_flags.DATA_DIR.value, SOURCES.value, MAX_PAIRS.value]
    if MAX_WORDS.value is not None:
        made_of.append(MAX_WORDS.value)
    name = f"{PAIR.value}-{text_folder.digest_of(made_of)[:16]}"
    folder = pathlib.Path(shared_flags.PREPARED_DIR.value) / "sides" / name
    with lifecycle.timed("giving each side its own text"):
        return parallel_side.split_parallel(
            shared_flags.DATA_DIR.value,
            languages(),
            folder,
            SOURCES.value or None,
            MAX_PAIRS.value,
            MAX_WORDS.value,
        )


def check() -> None:
    """Raises FlagError at what cannot work, before anything starts."""
    languages()
    if shared_flags.CLUSTER.value not in ("all", "whole"):
        own_folder()
    elif TEXT.value:
        raise shared_flags.FlagError(
            f"--text is for one cluster; --cluster={shared_flags.CLUSTER.value} makes"
            " both sides of --data_dir"
        )


def own_folder() -> pathlib.Path:
    """--text."""
    if not TEXT.value:
        raise shared_flags.FlagError(
            f"--cluster={shared_flags.CLUSTER.value} needs --text=FOLDER with its"
            " own side (python -m scripts.split_parallel makes both)"
        )
    return pathlib.Path(TEXT.value)


def read(
    folder: pathlib.Path, words: tokenizers.Tokenizer, *, is_translated: bool
) -> Text:
    """Reads and tokenises a side; says what a person should know of it.

    Args:
      folder: of the side.
      words: tokenizer.
      is_translated: whether the model reads dev and the tests too. If not, they are
        only compared with what it says.

    Raises:
      NebulaError: where it is malformed, or a sentence is too long.
    """
    ids, rows, texts = {}, {}, {}
    for name in parallel_side.splits(folder):
        file = parallel_side.path(folder, name)
        if name != "train":
            ids[name], texts[name] = parallel_side.read(file)
            if not is_translated:
                continue
        rows[name] = ragged_rows.prepare(
            file,
            words,
            words.digest,
            abnet_config.buckets()[-1],
            unknown=words.special.unk,
            before=(words.special.cls,),
            after=(words.special.sep,),
            # What is only translated may be cut: the training set is a person's choice.
            truncate=abnet_config.TRUNCATE.value or name != "train",
            prepared_dir=pathlib.Path(shared_flags.PREPARED_DIR.value),
        )
        for remark in rows[name].remarks():
            lifecycle.say(f"{file}: {remark}")
        ids[name] = rows[name].ids
    return Text(words, ids, rows, texts)


def id_key() -> bytes:
    """Under which ids are compared."""
    if ID_KEY.value:
        key = pathlib.Path(ID_KEY.value).read_bytes()
        if not key:
            raise shared_flags.FlagError(f"--id_key={ID_KEY.value}: the file is empty")
        return key
    return example_alignment.default_key(PAIR.value, str(shared_flags.SEED.value))


def check_same_examples(text: Text, peer: frames.Hello) -> None:
    """Raises Mismatch, naming examples, unless the peer has the other halves."""
    apart = example_alignment.differences(
        text.ids, id_key(), peer.details.get("examples")
    )
    if apart:
        raise bridge.Mismatch(
            f"{shared_flags.CLUSTER.value} and {peer.cluster} do not hold the same"
            f" examples: {'; '.join(apart)}"
        )


def capacity(lengths: np.ndarray) -> int:
    """The smallest of --buckets that holds rows of these lengths."""
    return next(c for c in abnet_config.buckets() if c >= lengths.max(initial=0))


def slots(lengths: np.ndarray, rows: int, columns: int, objective: str) -> np.ndarray:
    """[P] int8 zeros: as many places as a target micro-batch may be asked at.

    P is one of a few, so that jit compiles a handful of shapes: a quarter of the
    batch's places, half of them, and so on. With `cmlm` the masks of a row's n pieces
    are U{1..n}, drawn on the device: those beyond four standard deviations above the
    mean of their sum are not asked, and counted.
    """
    needed = int(lengths.sum()) - len(lengths)  # all but [CLS]
    if objective == "cmlm":
        pieces = np.maximum(lengths.astype(np.int64) - 2, 1)
        most = np.sum(pieces + 1) / 2 + 4 * np.sqrt(np.sum(pieces**2 - 1) / 12)
        needed = int(min(np.ceil(most), pieces.sum()))
    quarter = -(-rows * columns // 4)
    return np.zeros(min(4, -(-needed // quarter)) * quarter, np.int8)


def digest(text: Text) -> str:
    """Tells this side's training examples, as the model reads them, from others."""
    rows = text.rows["train"]
    found = hmac.new(id_key(), "\n".join(rows.ids).encode(), "sha256")
    for array in (rows.offsets, rows.tokens):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:12]


def chosen(count: int, total: int) -> np.ndarray:
    """[<= count] int64: which of `total` examples are translated for a BLEU."""
    return np.arange(total)[:count]


def evaluation_batches(
    text_rows: ragged_rows.TokenRows, of: np.ndarray, batch_size: int
) -> Sequence[length_buckets.EvaluationBatch]:
    """Batches of the examples `of`, alike ones together.

    Made by the source side; the target side is told the lengths it has to work with by
    what crosses.
    """
    lengths = text_rows.lengths[of]
    buckets = length_buckets.bucket_of(lengths, abnet_config.buckets())
    return length_buckets.evaluation_batches(buckets, batch_size, lengths)


def describe(text: Text) -> dict[str, Any]:
    """Numbers for a summary."""
    return {
        name: {"sentences": len(rows), "tokens": int(rows.lengths.sum())}
        for name, rows in text.rows.items()
    }
