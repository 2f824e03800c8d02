"""The settings that every pre-training has; its own `config` adds to them."""

import dataclasses

from experiments import configuration, fields
from experiments import shared_flags as _defines_flags  # noqa: F401
from nebula_jax import errors
from nebula_jax.training import masking, warm_start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(configuration.Agreed):
    """The settings that all clusters share."""

    task_mix: str = fields.setting(
        "mrtd=1 trtd=1",
        "Weights of the tasks of every cluster with text, or of each: mrtd reads single"
        " languages, trtd translations.\n"
        '"mrtd|trtd|mrtd=1 trtd=3": one part for each cluster; a weight is 1 if it is'
        " not given.",
        group="data",
    )
    max_length: int = fields.setting(64, "Tokens of a sequence.", group="data", lower=8)
    dropout: float = fields.setting(
        0.1, "Dropout rate in the encoders.", group="training", lower=0.0, upper=0.9
    )
    mask_rate: float = fields.setting(
        0.15,
        "Share of tokens masked.",
        group="training",
        lower=0.01,
        upper=0.9,
        source="section 4.1",
    )
    mask_policy: str = fields.setting(
        "electra",
        "Pieces at masked positions: mask (always [MASK]), electra (15 % kept), bert"
        " (10 % random, 10 % kept).",
        group="training",
        choices=list(masking.POLICIES),
    )
    weight_decay: float = fields.setting(
        0.0, "Decoupled weight decay of AdamW.", group="training", lower=0.0
    )
    eval_batches: int = fields.setting(
        2, "Held-out batches of each language.", group="run", lower=1
    )
    # What keeps a pretrained encoder from being spoiled by new heads.
    head_warmup_steps: int = fields.setting(
        0,
        "Steps in which the new heads train alone, the encoder and its embeddings"
        " frozen.",
        group="expert",
        lower=0,
    )
    head_learning_rate: float = fields.setting(
        0.0,
        "Peak learning rate of the new heads; 0 for --learning_rate.",
        group="expert",
        lower=0.0,
    )
    head_priors: bool = fields.setting(
        False,
        "Set the biases of the new heads to the frequencies of the text, counted in"
        " --head_warmup_steps, so that the encoder need not learn them.",
        group="expert",
    )
    layer_decay: float
    freeze_embeddings: bool
    warmup_steps: int
    clip_norm: float

    def start(self) -> warm_start.Config:
        """Returns what keeps a pretrained encoder from being spoiled by new heads.

        Raises:
          errors.SettingsError: if the settings do not go together.
        """
        try:
            return warm_start.Config(**fields.common(self, warm_start.Config))
        except ValueError as error:
            raise errors.SettingsError(f"--{error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(configuration.Local):
    """The settings that each cluster chooses for itself."""

    vocabulary: str = fields.setting(
        "",
        "File of the sentencepiece model that all clusters share, or with --hot_start"
        " the folder of its trimmed tokenizer. If empty, --cluster=all and"
        " --cluster=whole make one from the text, of --vocab_size pieces.",
        group="data",
    )
    vocab_size: int = fields.setting(
        8000,
        "Pieces of a vocabulary that is trained here; with --hot_start, pieces of the"
        " tokenizer that are kept, the most frequent in the text.",
        group="data",
        lower=32,
    )
    vocab_lines: int = fields.setting(
        200_000,
        "Largest number of sentences to train the vocabulary on.",
        group="data",
        lower=1,
    )
    hot_start: str = fields.setting(
        "",
        "Encoder that every model of the run begins with (section 4.1): a name of"
        " scripts/prepare_pretrained.py, or a checkpoint folder. If empty, random"
        " weights.",
        group="model",
    )
    mono_alpha: float = fields.setting(
        0.3, "Sampling exponent of single languages.", group="data", lower=0.0
    )
    parallel_alpha: float = fields.setting(
        0.7, "Sampling exponent of translations.", group="data", lower=0.0
    )
    emulate_compute: tuple[int, ...] = fields.setting(
        (),
        "Milliseconds that stand in for the compute of a larger model: every process"
        " sleeps them. For timings on machines that are too small.\n"
        "With pretrain_m3 two numbers, as in 50,400, for each micro-batch of a"
        " generator and each step of the discriminator; with pretrain_bert one number,"
        " for each step.",
        group="expert",
    )
    pipeline: int
