"""The run that is attacked: an ABNet after training, and its source text.

N training pairs, L source length, D width of PLM-S, V pieces.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import configuration
from experiments.abnet import config as abnet_config
from experiments.abnet import data, translator, whole
from nebula_jax import files
from nebula_jax.data import length_buckets
from nebula_jax.models import abnet, pretrained, transformer
from nebula_jax.models.pretrained import trimming
from nebula_jax.training import partition
from scripts.tables import abnet as abnet_runs
from scripts.tables import config
from scripts.tables import runs as table_runs

NO_PIECE = -1
ROWS = 256  # that are encoded at once


class Rows(NamedTuple):
    """The source rows, and the pieces that an attacker looks for.

    ids: [N, L] int32, padded; numbers of `kept`, so that tables are small.
    mask: [N, L] bool, false at padding. It crosses too.
    pieces: [N, L] int32, the number of each token among `candidates`; NO_PIECE at
      padding and special tokens, which are not counted.
    candidates: [V] int32, ids of all pieces of these rows, ascending.
    kept: [K] int32, the tokenizer's ids of all tokens of these rows, ascending.
    """

    ids: np.ndarray
    mask: np.ndarray
    pieces: np.ndarray
    candidates: np.ndarray
    kept: np.ndarray


class AttackedModel(NamedTuple):
    """A run, and its source side.

    run: its configuration.
    both: models and text of both sides.
    params: all parameters of the source, after training. Of PLM-S's table there are the
      rows that the text has.
    model: PLM-S alone, likewise; this much is public.
    rows: of the source side.
    """

    run: abnet_config.Run
    both: whole.Both
    params: Any
    model: pretrained.Pretrained
    rows: Rows


def train(table: config.Table, flagfile: pathlib.Path) -> pathlib.Path:
    """Trains what is attacked, unless that was done before; returns its folder.

    The codecs have no part in it, which are compared on one and the same model.

    Args:
      table: its folder gets `run`.
    """
    arguments = [*table.arguments(flagfile), "--cluster=whole", "--seed=0"]
    arguments += ["--bleu_sentences=1", "--held_out_pairs=0"]  # Table 5 has the BLEU
    # What was trained with other flags is another model.
    settings = [arguments[1:], table_runs.settings(flagfile)]
    workdir = table.workdir / f"run-{files.digest_of(settings)}"
    if not (workdir / "summary.json").is_file():
        workdir.mkdir(parents=True, exist_ok=True)
        run = table_runs.Run("train_abnet", abnet_runs.MODULE, tuple(arguments))
        table_runs.start(run, workdir)
    return workdir


def load(workdir: pathlib.Path) -> AttackedModel:
    """Reads what `train` left.

    Raises:
      errors.NebulaError: if it has no checkpoint.
    """
    configuration.parse_run(str(workdir), "train_abnet")
    run = abnet_config.from_flags()
    _, trained = translator.trained_params(workdir)
    return assemble(run, data.split(run), trained)


def assemble(
    run: abnet_config.Run, folders: whole.Folders, trained: Sequence[Any] | None = None
) -> AttackedModel:
    """Puts together a run's models, its text and what was trained.

    Args:
      folders: text of source and target.
      trained: parameters of the two sides; those at step 0 if None.
    """
    both = whole.load(run, folders)
    if trained is None:
        trained = [half.fresh.init().params for half in both.halves]
    source = partition.merge(jax.device_put(trained[0]), both.halves[0].frozen)
    text, special = both.texts[0].train, both.plms[0].tokenizer.special
    longest = run.agreed.length_buckets[-1]
    rows = rows_of(text.rows(np.arange(len(text)), longest, special.pad), special)
    model = trimming.select_rows(both.plms[0].model, rows.kept)
    embeddings = source["embeddings"]
    table = {"embedding": embeddings["word_embeddings"]["embedding"][rows.kept]}
    source |= {"embeddings": embeddings | {"word_embeddings": table}}
    return AttackedModel(run, both, source, model, rows)


def rows_of(ids: np.ndarray, special: Any) -> Rows:
    """Numbers the pieces of padded rows.

    Args:
      ids: [N, L] int32.
      special: `tokenizers.SpecialTokens` of their tokenizer.
    """
    kept, numbers = np.unique(ids, return_inverse=True)
    numbers = numbers.reshape(ids.shape).astype(np.int32)
    is_text = ~special.contains(ids)
    candidates, places = np.unique(numbers[is_text], return_inverse=True)
    pieces = np.full(ids.shape, NO_PIECE, np.int32)
    pieces[is_text] = places
    return Rows(numbers, ids != special.pad, pieces, candidates, kept)


class Sides(NamedTuple):
    """The rows that one attacker attacks, and those that are its own.

    attacked: [A] int64, numbers of rows.
    own: [M] int64, likewise; no row equals one that is attacked.
    """

    attacked: np.ndarray
    own: np.ndarray


def sides(rows: Rows, seed: int, attacked: int) -> Sides:
    """Draws the rows that an attacker attacks; all others are its own text."""
    order = length_buckets.shuffled(len(rows.ids), seed)
    chosen = order[:attacked]
    same = {rows.ids[number].tobytes() for number in chosen}
    own = [each for each in order[attacked:] if rows.ids[each].tobytes() not in same]
    return Sides(chosen, np.asarray(own))


def encoded(attacked: AttackedModel, layers: int) -> np.ndarray:
    """Returns H^E of all source rows, cut after so many layers: [N, L, D] float32."""
    shape = attacked.both.halves[0].task.config
    plm = dataclasses.replace(
        shape.source, layers=layers, vocab_size=len(attacked.rows.kept)
    )
    cut = dataclasses.replace(shape, source=plm)

    @jax.jit
    def encode(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return abnet.encode(cut, params, ids, mask).hidden

    rows = attacked.rows
    count = min(ROWS, len(rows.ids))
    parts = []
    for start in range(0, len(rows.ids), count):
        # The last part is filled up with the first rows.
        index = np.arange(start, start + count) % len(rows.ids)
        parts.append(encode(attacked.params, rows.ids[index], rows.mask[index]))
    return np.concatenate(jax.device_get(parts))[: len(rows.ids)]


class Tables(NamedTuple):
    """The public embeddings of the candidates.

    embeddings: [V, E] float32, rows of the model's table.
    by_position: [L, V, D] float32, what its first layer would get at each position.
    """

    embeddings: jax.Array
    by_position: jax.Array


def tables(model: pretrained.Pretrained, rows: Rows) -> Tables:
    """Looks up the candidates in PLM-S."""
    length, params = rows.ids.shape[1], model.params["embeddings"]

    @jax.jit
    def embed(params: Any, ids: jax.Array) -> jax.Array:
        repeated = jnp.broadcast_to(ids[:, None], (len(ids), length))
        embeddings = transformer.Embeddings(model.config)
        return embeddings.apply({"params": params}, repeated, True).swapaxes(0, 1)

    table = params["word_embeddings"]["embedding"][rows.candidates]
    return Tables(jnp.asarray(table), embed(params, rows.candidates))
