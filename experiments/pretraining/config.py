"""The settings that every pre-training experiment has; its own `config` adds to them.

Flags that other experiments have as well are in `shared_flags`.
"""

import dataclasses

from absl import flags

from experiments import configuration
from nebula_jax import errors
from nebula_jax.training import warm_start

flags.DEFINE_string(
    "task_mix",
    "mrtd=1 trtd=1",
    "Weights of the tasks of every cluster with text, or of each, as in"
    ' "mrtd|trtd|mrtd=1 trtd=3": mrtd reads single languages, trtd translations.',
)
flags.DEFINE_float(
    "mono_alpha", 0.3, "Sampling exponent of single languages.", lower_bound=0.0
)
flags.DEFINE_float(
    "parallel_alpha", 0.7, "Sampling exponent of translations.", lower_bound=0.0
)

# What keeps a pretrained encoder from being spoiled by new heads.
flags.DEFINE_integer(
    "head_warmup_steps",
    0,
    "Steps in which the new heads train alone, the encoder and its embeddings frozen.",
    lower_bound=0,
)
flags.DEFINE_float(
    "head_learning_rate",
    0.0,
    "Peak learning rate of the new heads; 0 for --learning_rate.",
    lower_bound=0.0,
)
flags.DEFINE_bool(
    "head_priors",
    False,
    "Set the biases of the new heads to the frequencies of the text, counted in"
    " --head_warmup_steps, so that the encoder need not learn them.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(configuration.Agreed):
    """The settings that all clusters share."""

    task_mix: str
    """Weights of the tasks of every reader, or of each: "mrtd|mrtd=1 trtd=3"."""
    max_length: int
    """L, tokens."""
    dtype: str
    dropout: float
    mask_rate: float
    """Share of tokens; 0.15 in section 4.1."""
    mask_policy: str
    learning_rate: float
    """At its peak."""
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    """Largest global norm of a model's gradient; 0 for no clipping."""
    head_warmup_steps: int
    """In which new heads train alone."""
    head_learning_rate: float
    """At its peak; 0 for `learning_rate`."""
    head_priors: bool
    """True to set the new heads' biases to the frequencies of the text."""
    layer_decay: float
    """Learning rate of a layer, as a share of that of the layer above."""
    freeze_embeddings: bool
    """True to leave the embeddings as they are."""
    eval_every: int
    """Steps."""
    eval_batches: int
    """Batches of each language."""

    def start(self, teacher_gate: float = 0.0) -> warm_start.Config:
        """Returns what keeps a pretrained encoder from being spoiled by new heads.

        Args:
          teacher_gate: of M3.

        Raises:
          errors.SettingsError: if the settings do not go together.
        """
        try:
            return warm_start.Config(
                *(self.head_warmup_steps, self.head_learning_rate, self.layer_decay),
                *(self.freeze_embeddings, self.head_priors, teacher_gate),
            )
        except ValueError as error:
            raise errors.SettingsError(f"--{error}") from None

    def is_evaluated(self, step: int) -> bool:
        """Returns True if held-out text is evaluated after `step`."""
        return step % self.eval_every == 0 or step == self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(configuration.Local):
    """The settings that each cluster chooses for itself."""

    pipeline: int
    """Micro-batches of a pipeline over the devices of an fsdp group; 0 for none."""
    vocabulary: str
    """A file or folder; empty where it is yet to be made."""
    vocab_size: int
    """Pieces, where a vocabulary is made."""
    vocab_lines: int
    """Sentences it is made of, at most."""
    emulate_compute: tuple[int, ...]
    """Milliseconds; or none."""
    hot_start: str
    """A name or a folder; empty for random weights."""
    mono_alpha: float
    parallel_alpha: float
