"""The configuration of an ABNet run: its flags, and the values that are passed on."""

import dataclasses
import pathlib

from experiments import configuration, fields
from experiments import shared_flags as _defines_flags  # noqa: F401
from experiments.local_steps import config as local_steps_config
from nebula_jax import errors
from nebula_jax.models import abnet

DEFAULTS = {
    "job": "train_abnet",
    "learning_rate": 5e-4,
    "micro_batches": 4,
    "warmup_steps": 4000,
    "eval_every": 1000,
    "length_buckets": ["16", "32", "64"],
}
"""Shared flags that have another default in this experiment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(configuration.Agreed, local_steps_config.Settings):
    """The settings that all clusters share.

    Those of local steps count with several pairs.
    """

    replicas: int = fields.for_experts(
        1,
        "Pairs of a source and a target, each of which trains on its own examples of a"
        " joint batch, --replicas times --batch_size; local steps (--sync) join their"
        " parameters.",
        lower=1,
        upper=8,
    )
    pair: str = fields.to_begin_with(
        "es-en", "Languages of source and target; one of them is English."
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
        "Codec of the hidden states; auto if the run is to choose codecs by itself,"
        " by what they do to gradients and by the line.\n"
        "pack_tokens|svd(0.6)|fp16: codecs, one after the other.",
    )
    backward_codec: str = fields.of_line(
        "identity",
        "Codec of the gradients in the hidden states; or auto.\n"
        "pack_tokens|int8(64): as --forward_codec.",
    )
    probe_every: int = fields.for_experts(
        64,
        "Most steps from one comparison of gradients to the next, with auto codecs;"
        " comparisons are up to eight times as frequent while other codecs are sought."
        " Each takes two more micro-batches.",
        lower=2,
    )
    staleness: int = fields.of_line(
        0,
        "Steps by which the source's gradient is late, 0 or 1: with 1 a step's hidden"
        " states cross while the gradient of the step before is in flight, for lines"
        " with a long round trip.",
        upper=1,
    )
    bottleneck: tuple[int, ...]
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

    @property
    def rank(self) -> int:
        """The columns of the bottleneck, R; 0 without one."""
        return self.bottleneck[0] if self.bottleneck else 0

    def sent_width(self, width: int) -> int:
        """Returns the width of what crosses: R, or that of PLM-S without a bottleneck.

        Args:
          width: D of PLM-S.
        """
        return self.rank or width

    def is_saved_after(self, step: int) -> bool:
        """Returns True if a checkpoint is due after `step`, unless it is the last."""
        if self.replicas == 1:
            return step % self.checkpoint_every == 0
        return self.local_steps().is_saved_after(step, self.checkpoint_every)

    def window(self) -> int:
        """Returns how many steps the checkpoints of two clusters may be apart.

        Those of a pair are never apart: its source waits for the target's token, or for
        its gradient of the step that is saved. A
        cluster with all messages of a round has nothing to wait for until it applies
        the next one, while another may not have begun the step after its own message.
        """
        return 0 if self.replicas == 1 else self.inner_steps + self.delay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(configuration.Local):
    """The settings that each cluster chooses for itself."""

    source_model: str = fields.of_model(
        "e5-small",
        "Pretrained model of the source cluster, PLM-S: a name of"
        " scripts/prepare_pretrained.py, or a checkpoint folder.",
    )
    target_model: str = fields.of_model(
        "minilm-l6",
        "Pretrained model of the target cluster, PLM-T: a name of"
        " scripts/prepare_pretrained.py, or a checkpoint folder.",
    )
    source_layers: int = fields.of_model(
        0, "First layers of PLM-S that are used; 0 for all."
    )
    target_layers: int = fields.of_model(
        0, "First layers of PLM-T that are used; 0 for all."
    )
    train_all: bool = fields.of_training(
        False,
        "Train every parameter instead of the adapters alone: for models without"
        " pretraining, the baseline of Table 2.",
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
        "Folder of this cluster's own language, as scripts/split_parallel.py makes it."
        " If empty, --cluster=all and --cluster=whole make both of --data_dir.",
    )
    id_key: str = fields.of_security(
        "",
        "File with a secret of both clusters, under which they compare example ids and"
        " the fingerprints of text and models. Without one, whoever has the run's"
        " flags can test whether an id is among them. A resumed run needs the same"
        " key.",
    )


Run = configuration.Run[Agreed, Local]

FLAGS = fields.define(Agreed, Local)


def from_flags() -> Run:
    """Returns the flags as values; for `main`."""
    return Run(fields.read(Agreed), fields.read(Local))


def languages(pair: str) -> tuple[str, str]:
    """Returns the languages of source and target.

    Args:
      pair: such as es-en.

    Raises:
      errors.SettingsError: if it is not a pair.
    """
    found = tuple(pair.split("-"))
    if len(found) != 2 or not all(found):
        raise errors.SettingsError(f"--pair={pair}: expected two, such as es-en")
    return found


def side_dir(local: Local) -> pathlib.Path:
    """Returns --side_dir, which a cluster that runs alone must be given.

    Raises:
      errors.SettingsError: if it is not.
    """
    if not local.side_dir:
        raise errors.SettingsError(
            f"--cluster={local.cluster} needs --side_dir=FOLDER with its own language"
            " (python -m scripts.split_parallel makes both)"
        )
    return pathlib.Path(local.side_dir)
