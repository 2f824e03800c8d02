"""Flags of several experiments that have no class in common, and the entry point."""

import dataclasses

from experiments import configuration as _defines_its_flags  # noqa: F401
from nebula_jax import errors
from nebula_jax.commands import cluster_flags, fields
from nebula_jax.commands.command_line import run as run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared(cluster_flags.Clusters):
    """The flags that classes of several experiments name, or that no run keeps."""

    run: str = fields.of_run("", "Folder of an earlier run, whose flags hold.")
    eval_only: bool = fields.of_run(
        False, "Test what --run trained, on --data_dir; train nothing."
    )
    out: str = fields.of_run("", "File or folder to write.")
    init_from: str = fields.of_model(
        "",
        "Folder of a finished run whose parameters this one begins with, heads too."
        " Optimizer and steps begin anew; data, rate and batch may differ. Flags of the"
        " model, its languages and tasks are that run's where they are not given.",
    )
    languages: tuple[str, ...] = fields.of_data(
        ("all",),
        "Languages, such as en,sw: with finetune_xnli those to test in; with"
        " pretrain_bert those that every cluster reads, or all for those of the text"
        " folder.\n"
        'Groups, one for each cluster: "en de|hi ur".',
    )
    length_buckets: tuple[int, ...] = fields.of_data(
        (16, 32, 64),
        "Ascending numbers of tokens in a row; a batch has examples of one bucket. The"
        " last one bounds the length of an example.",
    )
    eval_batch_size: int = fields.of_training(
        64, "Examples of a batch where nothing is trained.", lower=1
    )
    warmup_steps: int = fields.of_training(
        10_000, "Steps until the peak learning rate."
    )
    warmup_ratio: float = fields.of_training(
        0.1,
        "Share of a fine-tuning's steps until the peak learning rate; a pre-training"
        " has --warmup_steps.",
        upper=1.0,
    )
    clip_norm: float = fields.of_training(
        1.0, "Largest global norm of a model's gradient; 0 for no clipping."
    )
    layer_decay: float = fields.of_training(
        1.0,
        "Learning rate of a layer, as a share of that of the layer above; 1 for one"
        " rate everywhere.",
        lower=0.01,
        upper=1.0,
    )
    freeze_embeddings: bool = fields.of_training(
        False, "Leave the embeddings as they are, and train the rest."
    )
    bottleneck: int = fields.of_line(
        0,
        "Columns of a learned linear layer at the cut, which cross in place of those"
        " of the hidden states; 0 for none.",
    )
    pipeline: int = fields.for_experts(
        0,
        "Micro-batches that go through the layers as a pipeline over the devices of"
        " each --fsdp group, of which each computes its own layers: for encoders too"
        " deep for one device. 0 for none.",
    )


fields.define(Shared)

MOST_BUCKETS = 250  # a bucket's number is a uint8


def check_buckets(lengths: tuple[int, ...], shortest: int) -> None:
    """Raises errors.SettingsError unless --length_buckets ascend from `shortest`."""
    is_ascending = bool(lengths) and list(lengths) == sorted(set(lengths))
    if not is_ascending or lengths[0] < shortest or len(lengths) > MOST_BUCKETS:
        raise errors.SettingsError(
            f"--length_buckets={','.join(map(str, lengths))}: must ascend, from"
            f" {shortest} or more, at most {MOST_BUCKETS} of them"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The settings that no run keeps: they choose what a command does."""

    run: str
    eval_only: bool
