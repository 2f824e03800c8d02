"""The settings that every pre-training has; its own `config` adds to them."""

import dataclasses

from experiments import configuration
from experiments import shared_flags as _defines_flags  # noqa: F401
from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.models import transformer
from nebula_jax.runtime.served import data_channels
from nebula_jax.training import masking, warm_start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(configuration.Agreed):
    """The settings that all clusters share."""

    task_mix: str = fields.of_data(
        "mrtd=1 trtd=1",
        "Weights of the tasks of every cluster with text, or of each: mrtd reads single"
        " languages, trtd translations.\n"
        '"mrtd|trtd|mrtd=1 trtd=3": one part for each cluster; a weight is 1 if it is'
        " not given.",
    )
    parallel_pairs: tuple[str, ...] = fields.of_data(
        (),
        "Pairs of languages whose translations trtd reads: each is read with its second"
        " language. If empty, English with every other language.\n"
        "de-fr,en-hi: the cluster that reads fr also reads parallel/de-fr.train.tsv.",
    )
    max_length: int = fields.of_data(64, "Tokens of a sequence.", lower=8)
    body: str = fields.of_model(
        "bert",
        "Form of the encoders' layers: bert; or modern, as ModernBERT's: norms before"
        " the layers, rotary positions, GeGLU, no biases, local and global attention in"
        " turn. With --hot_start it has to name that encoder's.",
        choices=list(transformer.BODIES),
    )
    dropout: float = fields.of_training(0.1, "Dropout rate in the encoders.", upper=0.9)
    mask_rate: float = fields.of_training(
        0.15, "Share of tokens masked.", lower=0.01, upper=0.9, source="section 4.1"
    )
    mask_policy: str = fields.of_training(
        "electra",
        "Pieces at masked positions: mask (always [MASK]), electra (15 % kept), bert"
        " (10 % random, 10 % kept).",
        choices=list(masking.POLICIES),
    )
    weight_decay: float = fields.of_training(0.0, "Decoupled weight decay of AdamW.")
    eval_batches: int = fields.of_run(2, "Held-out batches of each language.", lower=1)
    # What keeps a pretrained encoder from being spoiled by new heads.
    head_warmup_steps: int = fields.for_experts(
        0,
        "Steps in which the new heads train alone, the encoder and its embeddings"
        " frozen.",
    )
    head_learning_rate: float = fields.for_experts(
        0.0, "Peak learning rate of the new heads; 0 for --learning_rate."
    )
    head_priors: bool = fields.for_experts(
        False,
        "Set the biases of the new heads to the frequencies of the text, counted in"
        " --head_warmup_steps, so that the encoder need not learn them.",
    )
    layer_decay: float
    freeze_embeddings: bool
    warmup_steps: int
    clip_norm: float

    def start(self) -> warm_start.Config:
        """Returns what keeps a pretrained encoder from being spoiled by new heads.

        Raises errors.SettingsError if the settings do not go together.
        """
        try:
            return warm_start.Config(**fields.common(self, warm_start.Config))
        except ValueError as error:
            raise errors.SettingsError(f"--{error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(configuration.Local):
    """The settings that each cluster chooses for itself."""

    data: str = fields.of_security(
        "",
        "Text that is read through the data access interface of --federation, in place"
        " of --data_dir.\n"
        "handle:NAME, or handle:NAME@LAB if another organization might serve one of"
        " that name too.",
    )
    vocabulary: str = fields.of_data(
        "",
        "File of the sentencepiece model that all clusters share, or with --hot_start"
        " the folder of its trimmed tokenizer. If empty, --cluster=all and"
        " --cluster=whole make one from the text, of --vocab_size pieces.",
    )
    vocab_size: int = fields.of_data(
        8000,
        "Pieces of a vocabulary that is trained here; with --hot_start, pieces of the"
        " tokenizer that are kept, the most frequent in the text.",
        lower=32,
    )
    vocab_lines: int = fields.of_data(
        200_000, "Largest number of sentences to train the vocabulary on.", lower=1
    )
    hot_start: str = fields.of_model(
        "",
        "Encoder that every model of the run begins with (section 4.1): a name of"
        " scripts/prepare_pretrained.py, a checkpoint folder, or hf:ORG/NAME@COMMIT. If"
        " empty, random weights.",
    )
    mono_alpha: float = fields.of_data(0.3, "Sampling exponent of single languages.")
    parallel_alpha: float = fields.of_data(0.7, "Sampling exponent of translations.")
    emulate_compute: tuple[int, ...] = fields.for_experts(
        (),
        "Milliseconds that stand in for the compute of a larger model: every process"
        " sleeps them. For timings on machines that are too small.\n"
        "With pretrain_m3 two numbers, as in 50,400, for each micro-batch of a"
        " generator and each step of the discriminator; with pretrain_bert one number,"
        " for each step.",
    )
    pipeline: int

    def __post_init__(self) -> None:
        """Raises errors.SettingsError at what cannot work."""
        super().__post_init__()
        if not self.data:
            return
        data_channels.parse(self.data)
        if not self.federation:
            raise errors.SettingsError(f"--data={self.data} needs --federation=FOLDER")
        if self.cluster == "whole":
            raise errors.SettingsError(
                f"--data={self.data} is for clusters, not for --cluster=whole"
            )
        # The process with the link would have to share the rows with the others.
        if self.coordinator or self.processes_per_cluster > 1:
            raise errors.SettingsError(
                f"--data={self.data} is for clusters of one process each"
            )


fields.define(Agreed, Local)
