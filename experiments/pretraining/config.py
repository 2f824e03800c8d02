"""The settings that every pre-training experiment has; its own `config` adds to them.

Their flags are in `shared_flags`.
"""

import dataclasses

from experiments import configuration


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
    eval_every: int
    """Steps."""
    eval_batches: int
    """Batches of each language."""

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
