"""The configuration of an ABNet run: its flags, its codecs, and what cannot work."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import configuration, shared_flags
from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.communication import codecs, selector
from nebula_jax.evaluation import decoding
from nebula_jax.models import abnet
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints

CLUSTERS = ("target", "source")  # the first one listens, and the other dials it
WHOLE = ("whole",)

DEFAULTS = {
    "job": "train_abnet",
    "learning_rate": 5e-4,
    "micro_batches": 4,
    "warmup_steps": 4000,
    "eval_every": 1000,
    "length_buckets": ["16", "32", "64"],
}
"""Shared flags that have another default in this experiment."""


class Codecs(NamedTuple):
    """The codecs of a run, which are read once and passed on."""

    forward: selector.CodecOrSelector  # of hidden states
    backward: selector.CodecOrSelector  # of gradients in them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(configuration.Agreed):
    """The settings that both clusters share."""

    pair: str = fields.to_begin_with(
        "es-en", "Languages of source and target, of which there is parallel text."
    )
    length_buckets: tuple[int, ...]
    objective: str = fields.of_model(
        "cmlm",
        "Prediction of the target: cmlm (masked target and mask-predict, as in ABNet),"
        " or ar (one token after the other, and beam search).",
        choices=list(abnet.OBJECTIVES),
    )
    encoder_adapter_dim: int = fields.of_model(
        512, "Inner width of an encoder adapter.", lower=1, source="section 4.2"
    )
    decoder_adapter_dim: int = fields.of_model(
        512, "Inner width of a decoder adapter.", lower=1
    )
    cross_attention_heads: int = fields.of_model(
        4, "Heads of the adapters' cross attention.", lower=1
    )
    plm_dropout: float = fields.of_training(
        0.1, "Dropout rate in the pretrained layers.", upper=0.9
    )
    adapter_dropout: float = fields.of_training(
        0.1, "Dropout rate in the decoder adapters.", upper=0.9
    )
    source_corruption: float = fields.of_training(
        0.0,
        "Share of a source sentence that is masked; 0.1 in ABNet's code, not in its"
        " paper.",
        upper=0.9,
    )
    forward_codec: str = fields.of_line(
        "identity",
        "Codec of the hidden states.\n"
        "pack_tokens|svd(0.6)|fp16: codecs, one after the other.",
    )
    backward_codec: str = fields.of_line(
        "identity",
        "Codec of the gradients in the hidden states.\n"
        "pack_tokens|int8(64): as --forward_codec.",
    )
    bottleneck: int
    warmup_steps: int
    label_smoothing: float = fields.of_training(
        0.1, "Probability that label smoothing spreads over all pieces, ε.", upper=0.9
    )
    bleu_sentences: int = fields.of_run(
        200, "Most sentences of dev and of a test set.", lower=1
    )
    beams: int = fields.of_run(
        4,
        "Beams (ar) or candidate lengths (cmlm) of a sentence.",
        lower=1,
        source="section 4.2",
    )
    iterations: int = fields.of_run(
        10,
        "Passes of mask-predict after the first one.",
        lower=1,
        source="ABNet's code",
    )

    @functools.cached_property
    def codecs(self) -> Codecs:
        """The codecs of the run; raises codecs.CodecError if one cannot be read."""
        forward = codecs.from_string(self.forward_codec)
        return Codecs(forward, codecs.from_string(self.backward_codec))

    def sent_width(self, width: int) -> int:
        """Returns the width of what crosses: R, or without a bottleneck D of PLM-S."""
        return self.bottleneck or width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(configuration.Local):
    """The settings that each cluster chooses for itself."""

    source_model: str = fields.of_model(
        "e5-small",
        "Pretrained model of the source cluster, PLM-S: a name of"
        " scripts/prepare_pretrained.py, a checkpoint folder, or hf:ORG/NAME@COMMIT.",
    )
    target_model: str = fields.of_model(
        "minilm-l6",
        "Pretrained model of the target cluster, PLM-T: a name of"
        " scripts/prepare_pretrained.py, a checkpoint folder, or hf:ORG/NAME@COMMIT.",
    )
    init_from: str
    source_layers: int = fields.of_model(
        0, "First layers of PLM-S that are used; 0 for all."
    )
    target_layers: int = fields.of_model(
        0, "First layers of PLM-T that are used; 0 for all."
    )
    truncate: bool = fields.of_data(
        False, "Cut sentences of the training text that are too long."
    )
    max_in_flight: int = fields.of_line(
        4, "Micro-batches whose gradient the source cluster may await at once.", lower=1
    )
    mlm_head_steps: int = fields.of_training(
        300,
        "Steps in which the target cluster first trains an MLM head on its own text,"
        " if PLM-T has none; nothing crosses.",
    )
    corpora: tuple[str, ...] = fields.of_data(
        (),
        "Corpora whose training pairs are used, by the names in the column `source` of"
        " the pairs' file; all of them if empty.",
    )
    max_pairs: int | None = fields.of_data(
        None, "Most training pairs; all if not given.", lower=1
    )
    held_out_pairs: int = fields.of_data(
        0,
        "Pairs that are taken out of the training pairs; after the last step their"
        " loss is measured, and their BLEU.",
    )
    max_words: int | None = fields.of_data(
        None,
        "Most words, between spaces, of both sentences of a pair, in dev and test too;"
        " then the FLORES test, whose sentences are long, is left out.",
        lower=1,
    )
    side_dir: str = fields.of_data(
        "",
        "Folder of this cluster's own language, as scripts/split_parallel.py makes it"
        " of pairs that it chooses. If empty, --cluster=all and --cluster=whole make"
        " both of --data_dir.",
    )
    id_key: str = fields.of_security(
        "",
        "File with a secret of both clusters, under which they compare example ids and"
        " the fingerprints of text and models. Without one, whoever has the run's"
        " flags can test whether an id is among them. A resumed run needs the same"
        " key.",
    )


Run = configuration.Run[Agreed, Local]

FLAGS = fields.define(Agreed, Local, shared_flags.Command)


def from_flags(given: flags.FlagValues = flags.FLAGS) -> Run:
    """Returns the flags as values, by default this process's; for `main`."""
    return Run(fields.read(Agreed, given), fields.read(Local, given))


def languages(pair: str) -> tuple[str, str]:
    """Returns the languages of source and target.

    Raises errors.SettingsError if it is not a pair.
    """
    found = tuple(pair.split("-"))
    if len(found) != 2 or not all(found):
        raise errors.SettingsError(f"--pair={pair}: expected two, such as es-en")
    return found


def side_dir(local: Local) -> pathlib.Path:
    """Returns --side_dir, which a cluster that runs alone must be given.

    Raises errors.SettingsError if it is not.
    """
    if not local.side_dir:
        raise errors.SettingsError(
            f"--cluster={local.cluster} needs --side_dir=FOLDER with its own language"
            " (python -m scripts.split_parallel makes both)"
        )
    return pathlib.Path(local.side_dir)


def settings(run: Run) -> dict[str, Any]:
    """Returns what a Hello compares, and a checkpoint is checked against."""
    found = configuration.settings(run.agreed)
    if run.local.init_from:  # whose folder may be elsewhere in each cluster
        found[checkpoints.INIT_FROM] = f"step {earlier_step(run)}"
    return found


def earlier_step(run: Run) -> int:
    """Returns the step of --init_from that a run has begun with, or begins with.

    Raises errors.SettingsError if it has none that all sides of this process can have.
    """
    if (begun := begun_step(run)) is not None:
        return begun
    cluster = run.local.cluster
    roles = CLUSTERS if cluster in ("all", "whole") else (cluster,)
    return _newest(run.local.init_from, roles)


def begun_step(run: Run) -> int | None:
    """Returns the step of --init_from that a run's own checkpoints name, if any."""
    cluster = run.local.cluster
    own = {"all": CLUSTERS, "whole": WHOLE}.get(cluster, (cluster,))
    return checkpoints.begun_step(run.local.workdir, own)


@functools.cache  # digests of all its files
def _newest(folder: str, roles: tuple[str, ...]) -> int:
    try:
        return newest_saved(pathlib.Path(folder), roles)[0]
    except errors.NebulaError as error:
        raise errors.SettingsError(f"--init_from={error}") from None  # begins with it


def newest_saved(
    workdir: pathlib.Path, roles: Sequence[str]
) -> tuple[int, tuple[str, ...]]:
    """Returns the newest step that sides have saved, and the folders that have it.

    These are the sides' own, or that of one process, whichever has the newer one.
    Raises errors.NebulaError if there is none.
    """
    layouts = [
        names
        for names in (WHOLE, tuple(roles))
        if all(checkpoints.folder_of(workdir, name).is_dir() for name in names)
    ] or [tuple(roles)]
    common, missing = [], []
    for names in layouts:
        try:
            common.append((checkpoints.newest_in_all(workdir, names), names))
        except errors.NebulaError as error:
            missing.append(str(error))
    if not common:
        raise errors.NebulaError(
            f"{'; '.join(missing)}; the folders of {' and '.join(roles)} have to be in"
            " it"
        )
    step, names = max(common, key=lambda each: each[0])
    if len(layouts) > 1:
        process.message(f"{workdir}: step {step} of {' and '.join(names)}")
    return step, names


def check(run: Run) -> None:
    """Raises errors.NebulaError at what cannot work, before anything starts."""
    agreed, local = run.agreed, run.local
    if local.cluster not in ("all", "whole", *CLUSTERS):
        raise errors.SettingsError(
            f"--cluster={local.cluster}: expected all, whole, source or target"
        )
    languages(agreed.pair)
    shared_flags.check_buckets(agreed.length_buckets, shortest=4)
    check_beams(agreed)
    _ = agreed.codecs  # reads them
    devices.check(local.layout(), agreed.batch_size, agreed.micro_batches)
    if local.cluster in CLUSTERS:
        side_dir(local)
    elif local.side_dir:
        raise errors.SettingsError(
            f"--side_dir is for one cluster; --cluster={local.cluster} makes both sides"
            " of --data_dir"
        )


def check_beams(agreed: Agreed) -> None:
    """Raises errors.SettingsError if there are fewer lengths than candidates."""
    longest = agreed.length_buckets[-1]
    lengths = longest + 1 - decoding.SHORTEST
    if agreed.objective == "cmlm" and agreed.beams > lengths:
        raise errors.SettingsError(
            f"--beams={agreed.beams}: with --objective=cmlm these are lengths of a"
            f" translation, of which --length_buckets={longest} leaves {lengths}"
        )
