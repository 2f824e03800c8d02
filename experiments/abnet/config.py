"""The configuration of an ABNet run: its flags, and the values that are passed on."""

import dataclasses
import pathlib
from typing import Any

from absl import flags

from experiments import configuration, fields
from experiments.local_steps import config as local_steps_config
from nebula_jax import errors
from nebula_jax.models import abnet

# The text.
flags.DEFINE_string(
    "pair", "es-en", "Languages of source and target; one of them is English."
)
flags.DEFINE_list(
    "corpora",
    [],
    "Corpora whose training pairs are used, by the names in the column `source` of the"
    " pairs' file; all of them if empty.",
)
flags.DEFINE_integer(
    "max_pairs", None, "Most training pairs; all if not given.", lower_bound=1
)
flags.DEFINE_integer(
    "held_out_pairs",
    0,
    "Pairs that are taken out of the training pairs; after the last step their loss is"
    " measured, and their BLEU.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "max_words",
    None,
    "Most words, between spaces, of both sentences of a pair, in dev and test too; then"
    " the FLORES test, whose sentences are long, is left out.",
    lower_bound=1,
)
flags.DEFINE_string(
    "side_dir",
    "",
    "Folder of this cluster's own language, as scripts/split_parallel.py makes it. If"
    " empty, --cluster=all and --cluster=whole make both of --data_dir.",
)
flags.DEFINE_string(
    "id_key",
    "",
    "File with a secret of both clusters, under which they compare example ids and the"
    " fingerprints of text and models. Without one, whoever has the run's flags can"
    " test whether an id is among them. A resumed run needs the same key.",
)
flags.DEFINE_bool(
    "truncate", False, "Cut sentences of the training text that are too long."
)

# The models.
flags.DEFINE_string(
    "source_model",
    "e5-small",
    "Pretrained model of the source cluster, PLM-S: a name of"
    " scripts/prepare_pretrained.py, or a checkpoint folder.",
)
flags.DEFINE_string(
    "target_model",
    "minilm-l6",
    "Pretrained model of the target cluster, PLM-T: a name of"
    " scripts/prepare_pretrained.py, or a checkpoint folder.",
)
flags.DEFINE_integer(
    "source_layers", 0, "First layers of PLM-S that are used; 0 for all.", lower_bound=0
)
flags.DEFINE_integer(
    "target_layers", 0, "First layers of PLM-T that are used; 0 for all.", lower_bound=0
)
flags.DEFINE_bool(
    "train_all",
    False,
    "Train every parameter instead of the adapters alone: for models without"
    " pretraining, the baseline of Table 2.",
)
flags.DEFINE_enum(
    "objective",
    "cmlm",
    list(abnet.OBJECTIVES),
    "cmlm: masked target and mask-predict, as in ABNet; ar: one token after the other"
    " and beam search.",
)
flags.DEFINE_integer(
    "encoder_adapter_dim", 512, "Inner width of an encoder adapter.", lower_bound=1
)
flags.DEFINE_integer(
    "decoder_adapter_dim", 512, "Inner width of a decoder adapter.", lower_bound=1
)
flags.DEFINE_integer(
    "cross_attention_heads", 4, "Heads of the adapters' cross attention.", lower_bound=1
)
flags.DEFINE_integer(
    "mlm_head_steps",
    300,
    "Steps in which the target cluster first trains an MLM head on its own text, if"
    " PLM-T has none; nothing crosses.",
    lower_bound=0,
)

# Training.
flags.DEFINE_float(
    "plm_dropout",
    0.1,
    "Dropout rate in the pretrained layers.",
    lower_bound=0.0,
    upper_bound=0.9,
)
flags.DEFINE_float(
    "adapter_dropout",
    0.1,
    "Dropout rate in the decoder adapters.",
    lower_bound=0.0,
    upper_bound=0.9,
)
flags.DEFINE_float(
    "source_corruption",
    0.0,
    "Share of a source sentence that is masked; 0.1 in ABNet's code, not in its paper.",
    lower_bound=0.0,
    upper_bound=0.9,
)
flags.DEFINE_float(
    "label_smoothing",
    0.1,
    "Probability that label smoothing spreads over all pieces, ε.",
    lower_bound=0.0,
    upper_bound=0.9,
)
flags.DEFINE_integer(
    "max_in_flight",
    4,
    "Micro-batches whose gradient the source cluster may await at once.",
    lower_bound=1,
)
flags.DEFINE_string(
    "forward_codec",
    "identity",
    "Codec of the hidden states, such as pack_tokens|svd(0.6)|fp16; auto if the run is"
    " to choose codecs by itself, by what they do to gradients and by the line.",
)
flags.DEFINE_string(
    "backward_codec",
    "identity",
    "Codec of the gradients in them, such as pack_tokens|int8(64); or auto.",
)
flags.DEFINE_integer(
    "probe_every",
    64,
    "With auto codecs: steps from one comparison of gradients to the next, at most; it"
    " comes up to eight times as often while other codecs are sought. Each takes two"
    " more micro-batches.",
    lower_bound=2,
)
flags.DEFINE_integer(
    "staleness",
    0,
    "1 to train the source with the gradient of the step before, so that a step's"
    " hidden states cross while that is on its way: for lines with a long round trip.",
    lower_bound=0,
    upper_bound=1,
)
flags.DEFINE_integer(
    "replicas",
    1,
    "Pairs of a source and a target, each of which trains on its own examples of a"
    " joint batch, --replicas times --batch_size; local steps (--sync) join their"
    " parameters.",
    lower_bound=1,
    upper_bound=8,
)

# Evaluation.
flags.DEFINE_integer(
    "bleu_sentences", 200, "Most sentences of dev and of a test set.", lower_bound=1
)
flags.DEFINE_integer(
    "beams", 4, "Beams (ar) or candidate lengths (cmlm) of a sentence.", lower_bound=1
)
flags.DEFINE_integer(
    "iterations", 10, "Passes of mask-predict after the first one.", lower_bound=1
)

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

    replicas: int
    """Pairs, R; `batch_size` is that of each."""
    pair: str
    """Languages of source and target."""
    length_buckets: tuple[int, ...]
    """Tokens of a row, ascending."""
    objective: str
    encoder_adapter_dim: int
    """Units; 512 in section 4.2."""
    decoder_adapter_dim: int
    """Units."""
    cross_attention_heads: int
    dtype: str
    plm_dropout: float
    adapter_dropout: float
    source_corruption: float
    """Share of a sentence's tokens."""
    forward_codec: str
    """Codec of hidden states."""
    backward_codec: str
    """Codec of their gradients."""
    probe_every: int
    """Steps, with `auto` codecs."""
    staleness: int
    """Steps by which the source's gradients are late, 0 or 1."""
    bottleneck: tuple[int, ...]
    """Ranks of a learned layer at the cut, the highest first; empty for none."""
    learning_rate: float
    """At its peak."""
    warmup_steps: int
    """4,000 in section 4.2."""
    label_smoothing: float
    """ε."""
    eval_every: int
    """Steps."""
    bleu_sentences: int
    """At most, of a split; not of held-out pairs."""
    beams: int
    """Or candidate lengths; 4 in section 4.2."""
    iterations: int
    """Passes of mask-predict; 10 in ABNet's code."""

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

    def is_evaluated(self, step: int) -> bool:
        """Returns True if dev is translated after `step`."""
        return step % self.eval_every == 0 or step == self.steps

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

    source_model: str
    """A name or a folder."""
    target_model: str
    """A name or a folder."""
    source_layers: int
    """0 for all."""
    target_layers: int
    """0 for all."""
    train_all: bool
    truncate: bool
    max_in_flight: int
    """Micro-batches."""
    mlm_head_steps: int
    corpora: tuple[str, ...]
    """Empty for all."""
    max_pairs: int | None
    """None for all."""
    held_out_pairs: int
    max_words: int | None
    """At most, in a sentence; None for any number."""
    side_dir: str
    """A folder; empty where both sides are made of data_dir."""
    id_key: str
    """A file; empty for a key that follows from the settings."""


Run = configuration.Run[Agreed, Local]

FLAGS = fields.define(Agreed, Local)


def from_flags() -> Run:
    """Returns the flags as values; for `main`."""
    return Run(fields.read(Agreed), fields.read(Local))


def settings(agreed: Agreed) -> dict[str, Any]:
    """Returns what a Hello compares, and a checkpoint is checked against.

    Of one pair, without a bottleneck, with fixed codecs and gradients of their own step
    it is what it was before there were these: runs of then go on.
    """
    found = configuration.settings(agreed)
    if not agreed.staleness:
        del found["--staleness"]
    if not agreed.bottleneck:
        del found["--bottleneck"]
    is_auto = "auto" in (agreed.forward_codec, agreed.backward_codec)
    if not is_auto:
        del found["--probe_every"], found["--quality"]
    if agreed.replicas > 1:
        return found
    unused = {each.name for each in dataclasses.fields(local_steps_config.Settings)}
    unused -= {"quality"} if is_auto else set()
    return {
        name: value
        for name, value in found.items()
        if name.removeprefix("--") not in unused | {"replicas"}
    }


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
