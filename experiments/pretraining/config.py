"""The settings that every pre-training experiment has; its own `config` adds to them.

Their flags are in `shared_flags`.
"""

import dataclasses

from experiments import configuration
from nebula_jax import errors
from nebula_jax.training import warm_start


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
