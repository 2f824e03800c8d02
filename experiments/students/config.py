"""The settings of distill: those of student and teachers beside those of every run."""

import dataclasses

from nebula_jax.commands import fields
from nebula_jax.models import transformer
from nebula_jax.training import bert, distillation, masking


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of student and teachers beside those of every run."""

    teachers: tuple[str, ...] = fields.to_begin_with(
        (),
        "Folders of the teachers, or hf:ORG/NAME@COMMIT, in their order; a teacher on a"
        " machine of its own may name itself alone, and the student needs none.",
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
        model = bert.Config(encoder=shape, warmup=warmup, **own)
        return distillation.Config(model, self.teacher_share)

    @property
    def slots(self) -> int:
        """The slots of a row for masked pieces, M."""
        return masking.capacity(self.mask_rate, self.max_length)
