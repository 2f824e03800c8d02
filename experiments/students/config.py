"""The settings of distill: those of student and teachers beside those of every run."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.models import transformer
from nebula_jax.training import bert, distillation, masking

WEIGHT_RATE = 0.05  # step size of learned weights: they settle in some hundred steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of student and teachers beside those of every run."""

    teachers: tuple[str, ...] = fields.to_begin_with(
        (),
        "Folders of the teachers, or hf:ORG/NAME@COMMIT, in their order; a teacher on a"
        " machine of its own may name itself alone, and the student needs none.",
    )
    teacher_weights: tuple[str, ...] = fields.of_training(
        (),
        "Weights of the teachers in their mixture, such as 2,1. If empty, they are"
        " learned: those by which the mixture predicts the student's text best.",
    )
    teacher_share: float = fields.of_training(
        0.5, "Share of the teachers in the loss; the rest is the text's.", upper=1.0
    )
    top_k: int = fields.of_line(
        16, "Most likely pieces that a teacher sends of a masked place.", lower=1
    )
    student_size: str = fields.of_model(
        "nano", "Size of the student.", choices=list(transformer.SIZES)
    )
    vocabulary: str
    languages: tuple[str, ...]
    mono_alpha: float
    max_length: int
    batch_size: int
    eval_batch_size: int
    eval_batches: int
    eval_every: int
    steps: int
    seed: int
    mask_rate: float
    mask_policy: str
    dropout: float
    dtype: str
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float

    def student(self, vocab_size: int) -> distillation.Config:
        """Returns the configuration of a student of so many pieces."""
        shape = transformer.config_of_size(
            self.student_size,
            vocab_size=vocab_size,
            max_length=self.max_length,
            dropout=self.dropout,
            dtype=self.dtype,
        )
        warmup = min(1.0, self.warmup_steps / self.steps)
        own = fields.common(self, bert.Config)
        rate = 0.0 if self.teacher_weights else WEIGHT_RATE
        model = bert.Config(encoder=shape, warmup=warmup, **own)
        return distillation.Config(model, self.teacher_share, rate)

    @property
    def slots(self) -> int:
        """The slots of a row for masked pieces, M."""
        return masking.capacity(self.mask_rate, self.max_length)

    def scores(self, teachers: int) -> jax.Array:
        """Returns the logarithms of the first weights, [T] float32.

        Raises errors.SettingsError if they are not one for each teacher, above 0.
        """
        given = ",".join(self.teacher_weights)
        try:
            weights = [float(each) for each in self.teacher_weights] or [1.0] * teachers
        except ValueError:
            weights = []
        is_positive = all(0 < each < math.inf for each in weights)
        if len(weights) != teachers or not is_positive:
            raise errors.SettingsError(
                f"teacher_weights={given}: expected {teachers} numbers above 0, one for"
                " each teacher"
            )
        logs = np.log(weights)  # float64, in which none becomes 0 or infinite
        return jnp.asarray(logs - logs.max(), jnp.float32)
