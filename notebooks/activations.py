"""Tensors that would cross a cut through a trained discriminator: `compression.ipynb`.

A finished M3 run gives the parameters and the text. The discriminator is cut between
two encoder blocks, as ABNet-Cloud cuts its encoder from its decoder (section 3.2): the
hidden states there go one way, the gradient with respect to them comes back.

B batch, L length, D width, M mask capacity, K generators.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.data import (
    django_messages,
    language_mixture,
    packed_sequences,
    resumable_batches,
    text_folder,
)
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import heads, mask_slots, transformer
from nebula_jax.training import checkpoint, checkpoint_files, losses, m3, m3_predictions

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMAND = (
    "scripts/run python -m experiments.pretrain_m3"
    " --flagfile=experiments/flags/m3_quickstart.flags"
)
MASK_SEED = 0  # the same tokens are masked every time
DJANGO = "package:django"

Params = Any  # parameter tree


class RunError(errors.NebulaError):
    """A finished run that is missing, or lacks something."""


class Run(NamedTuple):
    """A finished M3 run.

    folder: of the run.
    flags: name -> value as text, from its run.flags.
    config: M3's, without dropout.
    seed: of the run.
    groups: the languages of each generator.
    vocabulary: that it was trained with.
    steps: of the discriminator's whole checkpoints, ascending.
    """

    folder: pathlib.Path
    flags: dict[str, str]
    config: m3.Config
    seed: int
    groups: list[list[str]]
    vocabulary: vocabularies.Vocabulary
    steps: list[int]


class Text(NamedTuple):
    """A text folder.

    name: of its owner, for the reader.
    folder: in the project's format.
    """

    name: str
    folder: pathlib.Path


class Crossing(NamedTuple):
    """The tensors that cross the cut in one step.

    mask: [B, L] bool, false at padding.
    hidden: [B, L, D] float32, output of the last block below the cut.
    gradient: [B, L, D] float32, of the loss with respect to it.
    loss: [] float32, eq. 11's part above the cut.
    """

    mask: jax.Array
    hidden: jax.Array
    gradient: jax.Array
    loss: jax.Array


def find_run() -> pathlib.Path:
    """Finds NEBULA_RUN's folder, or the newest of runs/ with the checkpoint needed.

    Raises:
      RunError: if there is none; with the command that makes one.
    """
    named = os.environ.get("NEBULA_RUN")
    if named:
        for folder in (pathlib.Path(named), ROOT / named):
            if _manifests(folder):
                return folder.resolve()
        raise RunError(f"NEBULA_RUN={named}: no discriminator's checkpoint in it")
    runs = [
        folder
        for folder in sorted(ROOT.glob("runs/*"))
        if _manifests(folder) and not _is_hot_started(folder)
    ]
    if not runs:
        raise RunError(
            "no finished run in runs/. Make one, in about four minutes on two cores:"
            f" {COMMAND}"
        )
    return max(runs, key=_modified)


def _is_hot_started(folder: pathlib.Path) -> bool:
    try:
        about = checkpoint_files.newest_about(folder / "discriminator" / "checkpoints")
    except checkpoint_files.CheckpointError:
        return False  # `open_run` reports what is wrong
    return bool(about.get("settings", {}).get("--hot_start"))


def open_run(folder: pathlib.Path) -> Run:
    """Reads the settings in a run's folder.

    Raises:
      RunError: if its checkpoints or its vocabulary are not there or not its own.
    """
    checkpoints, steps = _checkpoints(folder, "discriminator")
    settings = steps and checkpoint_files.about(checkpoints, steps[-1]).get("settings")
    if not settings:
        raise RunError(f"{folder.name}: no whole checkpoint of the discriminator")
    if _is_hot_started(folder):
        raise RunError(
            f"{folder.name} began with a pretrained encoder; this notebook reads"
            " runs from scratch only"
        )
    lines = (folder / "run.flags").read_text("utf-8").splitlines()
    flags = dict(
        line.removeprefix("--").split("=", 1) for line in lines if line.count("=")
    )
    vocabulary = _vocabulary(folder, flags, settings["vocabulary"])

    def model(name: str) -> transformer.Config:
        return transformer.config_of_size(
            settings[f"--{name}_size"],
            settings.get(f"--{name}_layers", 0),
            vocab_size=vocabulary.size,
            max_length=settings["--max_length"],
            dtype=settings["--dtype"],
        )

    rest = {
        field.name: settings[f"--{field.name}"]
        for field in dataclasses.fields(m3.Config)
        if f"--{field.name}" in settings
    }
    config = m3.Config(model("generator"), model("discriminator"), **rest)
    groups = language_mixture.parse_groups(settings["--generators"])
    return Run(folder, flags, config, settings["--seed"], groups, vocabulary, steps)


def discriminator(run: Run, step: int) -> Params:
    """Reads the discriminator's parameters after `step`, one of `run.steps`."""
    init = functools.partial(m3.init_discriminator, run.config, run.seed)
    return _params(run.folder / "discriminator" / "checkpoints", step, init)


def generator(run: Run, index: int) -> Params:
    """Reads the newest parameters of generator `index`.

    Raises:
      RunError: if it has no whole checkpoint.
    """
    folder, steps = _checkpoints(run.folder, f"generator-{index}")
    if not steps:
        raise RunError(f"{run.folder.name}: no whole checkpoint of generator:{index}")
    init = functools.partial(m3.init_generator, run.config, run.seed, index)
    return _params(folder, steps[-1], init)


def held_out_text(run: Run) -> Text:
    """Finds the run's own text folder if it is here, else Django's messages."""
    data_dir = run.flags.get("data_dir", DJANGO)
    folder = None if data_dir == DJANGO else _find(run.folder, data_dir, "mono")
    if folder is not None:
        return Text("the run's own", folder)
    prepared = run.flags.get("prepared_dir", "prepared")
    folder = _find(run.folder, f"{prepared}/django_messages", "mono/families.json")
    if folder is None:
        folder = ROOT / "prepared" / "django_messages"
        if not (folder / "mono" / "families.json").is_file():  # written last
            django_messages.write_text_folder(folder)
    name = "the run's own" if data_dir == DJANGO else "not the run's own, which is away"
    return Text(f"Django's messages ({name})", folder)


def corrupted_batches(
    run: Run, text: Text, count: int, batch_size: int, packed: bool = False
) -> list[m3.Tokens]:
    """Makes batches of held-out text as generators would send it, each row once.

    Args:
      run: whose generators corrupt it, each the languages it owns.
      text: where it comes from; begins anew where it is too little.
      count: batches.
      batch_size: B; less what does not divide by K.
      packed: whole lines joined up to L tokens, as in training; otherwise one line a
        row, as in translation.
    """
    rows = batch_size // len(run.groups)
    if not rows:
        raise RunError(f"a batch needs a row for each of {len(run.groups)} generators")
    corrupt = jax.jit(functools.partial(m3_predictions.corrupt, run.config))
    parts = []
    for index, group in enumerate(run.groups):
        params = generator(run, index)
        sequences = _sequences(run, text, group, packed)
        for number in range(count):
            ids = np.stack(list(itertools.islice(sequences, rows)))
            rng = jax.random.fold_in(jax.random.key(MASK_SEED + index), number)
            parts.append(corrupt(params, rng, ids))
    return [
        jax.tree.map(lambda *each: jnp.concatenate(each), *parts[number::count])
        for number in range(count)
    ]


def below(params: Params, cut: int) -> Params:
    """Returns the parameters below the cut: embeddings and the first `cut` blocks."""
    blocks = {f"layer_{layer}" for layer in range(cut)}
    encoder = {name: params["encoder"][name] for name in sorted(blocks)}
    return {"embeddings": params["embeddings"], "encoder": encoder}


def above(params: Params, cut: int) -> Params:
    """Returns the parameters above it: the other blocks, heads, and the CLM's table.

    The table is tied to the embeddings, so here both clusters have a copy; ABNet, whose
    decoder has its own output layer, does not need one.
    """
    kept = below(params, cut)["encoder"]
    encoder = {k: v for k, v in params["encoder"].items() if k not in kept}
    table = params["embeddings"]["word_embeddings"]["embedding"]
    heads_ = {name: params[name] for name in ("rtd_head", "clm_head")}
    return {"encoder": encoder, "table": table, **heads_}


def hidden_below(config: m3.Config, cut: int, params: Params, tokens: m3.Tokens):
    """Computes from tokens mask [B, L] bool and hidden [B, L, D] float32 at the cut.

    Args:
      config: of the run.
      cut: blocks below the cut.
      params: of `below`.
      tokens: what the generators sent.
    """
    model = config.discriminator
    # A generator may sample [PAD] itself: a masked position is never padding.
    mask = (tokens.input_ids != vocabularies.SPECIAL.pad) | tokens.masked
    hidden = transformer.Embeddings(model).apply(
        {"params": params["embeddings"]}, tokens.input_ids, True
    )
    return mask, _blocks(config, range(cut), params, hidden, mask)


def loss_above(
    config: m3.Config,
    cut: int,
    params: Params,
    hidden: jax.Array,
    mask: jax.Array,
    tokens: m3.Tokens,
) -> jax.Array:
    """Computes λ L_D + γ L_CLM of eq. 11 from the hidden states at the cut.

    Args:
      config: of the run.
      cut: blocks below the cut.
      params: of `above`.
      hidden: [B, L, D] float32.
      mask: [B, L] bool, false at padding.
      tokens: what the generators sent.
    """
    model = config.discriminator
    hidden = _blocks(config, range(cut, model.layers), params, hidden, mask)
    positions = mask_slots.find(tokens.masked, tokens.originals.shape[-1])
    text = mask_slots.scatter(tokens.input_ids, positions, tokens.originals)
    filled = positions < tokens.input_ids.shape[-1]
    rtd_logits = heads.RTDHead(model).apply({"params": params["rtd_head"]}, hidden)
    clm_logits = heads.CLMHead(model).apply(
        {"params": params["clm_head"]},
        mask_slots.gather(hidden, positions),
        params["table"],
    )
    rtd_loss = losses.replaced_token_detection(
        rtd_logits, tokens.input_ids == text, mask.astype(jnp.float32)
    )
    clm_loss = losses.masked_cross_entropy(
        clm_logits, tokens.originals, filled.astype(jnp.float32)
    )
    return config.rtd_weight * losses.mean(rtd_loss) + config.clm_weight * losses.mean(
        clm_loss
    )


def crossing(
    config: m3.Config, cut: int, params: Params, tokens: m3.Tokens
) -> Crossing:
    """Takes one step over the cut: hidden states up, the gradient down.

    Args:
      config: of the run.
      cut: blocks below the cut.
      params: of the whole discriminator.
      tokens: what the generators sent.
    """
    mask, hidden = hidden_below(config, cut, below(params, cut), tokens)
    loss, gradient = jax.value_and_grad(loss_above, argnums=3)(
        config, cut, above(params, cut), hidden, mask, tokens
    )
    return Crossing(mask, hidden, gradient, loss)


def _blocks(config: m3.Config, layers, params: Params, hidden, mask) -> jax.Array:
    block = transformer.Block(config.discriminator)
    for layer in layers:
        weights = params["encoder"][f"layer_{layer}"]
        hidden = block.apply({"params": weights}, hidden, mask, True)
    return hidden


def _sequences(
    run: Run, text: Text, group: list[str], packed: bool
) -> Iterator[np.ndarray]:
    """Yields rows [L] int32 of a group's held-out lines, languages in turn."""
    length = run.config.discriminator.max_length
    encode = run.vocabulary.encode

    def of(language: str) -> Iterator[list[int]]:
        path = text_folder.mono_path(text.folder, language, "valid")
        sentences = [encode(line) for line in text_folder.read_mono(path)]
        if packed:
            return itertools.cycle(packed_sequences.pack_mono(sentences, length))
        return itertools.cycle(
            next(packed_sequences.pack_mono([sentence], length))
            for sentence in sentences
            if sentence
        )

    for row in itertools.chain.from_iterable(zip(*map(of, group), strict=True)):
        yield resumable_batches.pad(np.asarray(row, np.int32), length)


def _checkpoints(run: pathlib.Path, cluster: str) -> tuple[pathlib.Path, list[int]]:
    """Returns a cluster's folder of checkpoints, and which of them are whole."""
    folder = run / cluster / "checkpoints"
    relative = f"{run.parent}{os.sep}"  # outputs show no paths of this machine

    def log(text: str) -> None:
        print(text.replace(relative, ""))

    return folder, checkpoint_files.verified_steps(folder, log)


def _params(folder: pathlib.Path, step: int, init: Callable[[], Any]) -> Params:
    shapes = jax.eval_shape(init)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = checkpoint.abstract(shapes, jax.tree.map(lambda _: here, shapes))
    return checkpoint.restore(folder, step, like)[0].params


def _vocabulary(
    folder: pathlib.Path, flags: dict[str, str], digest: str
) -> vocabularies.Vocabulary:
    name = flags.get("vocabulary", "")
    found = _find(folder, name) or _find(folder, f"prepared/{pathlib.Path(name).name}")
    if not name or found is None:
        raise RunError(
            f"{folder.name}: its vocabulary, {pathlib.Path(name).name}, is not where it"
            " was; put it into prepared/, or take another run (NEBULA_RUN)"
        )
    vocabulary = vocabularies.load(found)
    if not vocabulary.digest.startswith(digest):
        raise RunError(f"{folder.name}: {found.name} is not what it was trained with")
    return vocabulary


def _find(run: pathlib.Path, path: str, inside: str = "") -> pathlib.Path | None:
    """Finds a path of a run's flags, from where the command may have been given."""
    for base in (ROOT, *run.resolve().parents):
        if path and (base / path / inside).exists():
            return base / path
    return None


def _manifests(folder: pathlib.Path) -> list[pathlib.Path]:
    checkpoints = folder / "discriminator" / "checkpoints"
    return sorted(checkpoints.glob(f"{'[0-9]' * 8}/manifest.json"))


def _modified(folder: pathlib.Path) -> float:
    """Returns when the newest checkpoint was written."""
    return max(each.stat().st_mtime for each in _manifests(folder))
