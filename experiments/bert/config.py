"""The configuration of a BERT run: its flags, and the values that are passed on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments import configuration
from experiments.bert import local_steps
from experiments.pretraining import config as pretraining_config
from experiments.pretraining import hot_start, text
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import errors
from nebula_jax.commands import command_line, fields
from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import all_reduce, bert, optimizers

DEFAULTS = {
    "clusters": ["2"],
    "task_mix": "mrtd=1",
    "max_length": 128,
    "mask_policy": "bert",
    "eval_batch_size": 32,
    "job": "pretrain_bert",
}
"""Shared flags that have another default in this experiment."""

NAME = "cluster"
MOST_CLUSTERS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(pretraining_config.Agreed, local_steps.Settings):
    """The settings that all clusters share."""

    clusters: int
    languages: tuple[str, ...]
    model_size: str = fields.of_model(
        "mini", "Size of the encoder.", choices=list(transformer.SIZES)
    )
    layers: int = fields.of_model(
        0,
        "Layers of the encoder, the first ones of --hot_start; 0 for all of these, or"
        " without it for those of --model_size.",
    )
    trains: str = fields.of_model(
        "all",
        "Parameters that train, and so the only ones that cross: all; or, for a"
        " --hot_start, adapters_and_head: the head, which is new, and adapters (eq. 12)"
        " after every layer, while all else is frozen (Fig. 2).",
        choices=list(bert.TRAINS),
    )
    optimizer: str = fields.of_training(
        "adamw",
        "Optimizer of each cluster's own steps: adamw, or muon (for hidden matrices,"
        " Nesterov's Adam for the rest).",
        choices=list(optimizers.BY_NAME),
    )
    all_reduce: str = fields.for_experts(
        "each",
        "Times that the gradients of a cluster's devices are added up: after each"
        " micro-batch, or once a batch.",
        choices=list(all_reduce.WHEN),
    )
    eval_batch_size: int

    def groups(self) -> list[list[str]]:
        """Returns the languages of every cluster (one group), or of each."""
        return text.parsed(self.languages)


Local = pretraining_config.Local
Run = configuration.Run[Agreed, Local]

FLAGS = fields.define(Agreed, Local)


def from_flags() -> Run:
    """Returns the flags as values; for `main`."""
    agreed, local = fields.read(Agreed), fields.read(Local)
    return Run(
        dataclasses.replace(agreed, hub=full_name(agreed.hub)),
        dataclasses.replace(local, cluster=full_name(local.cluster)),
    )


def context(run: Run) -> context_lib.Context:
    """Returns the context of a training loop."""
    window, seconds = run.agreed.window(), sum(run.local.emulate_compute) / 1000
    return run.context(window=window, emulated_seconds=seconds)


def name_of(index: int) -> str:
    """Returns the name of a cluster, such as `cluster:1`."""
    return f"{NAME}:{index}"


def names(agreed: Agreed) -> list[str]:
    """Returns the names of all clusters, in their order."""
    return [name_of(index) for index in range(agreed.clusters)]


def full_name(text: str) -> str:
    """Returns `cluster:1` for `1`; anything else as it is."""
    number = command_line.whole_number(text)
    return text if number is None else name_of(number)


def index_of(agreed: Agreed, name: str) -> int:
    """Returns a cluster's number, or raises errors.SettingsError if there is none."""
    found = names(agreed)
    if name not in found:
        raise errors.SettingsError(
            f"--cluster={name}: expected all, whole, or one of"
            f" {', '.join(map(str, range(agreed.clusters)))}"
        )
    return found.index(name)


def with_groups(run: Run, groups: Sequence[Sequence[str]]) -> Run:
    """Returns the run with its languages written out."""
    return run.with_agreed(languages=(language_mixture.format_groups(groups),))


def check(run: Run) -> None:
    """Raises errors.NebulaError at what cannot work, before anything starts."""
    agreed, local = run.agreed, run.local
    _check_clusters(agreed)
    local_steps.check(agreed, names(agreed))
    # Processes would have to agree on what has arrived, time and again.
    if agreed.quorum and (local.coordinator or local.processes_per_cluster > 1):
        raise errors.SettingsError(
            f"--quorum={agreed.quorum} is for clusters of one process each"
        )
    if len(local.emulate_compute) > 1:
        given = ",".join(map(str, local.emulate_compute))
        raise errors.SettingsError(
            f"--emulate_compute={given}: expected one number, as in 50"
        )
    _check_training(run)
    if local.cluster not in ("all", "whole"):
        index_of(agreed, local.cluster)
    layout = local.layout()
    devices.check(layout, agreed.batch_size, agreed.micro_batches)
    replicas = max(1, layout.devices_per_cluster // layout.model_parallel)
    if agreed.eval_batch_size % replicas:
        raise errors.SettingsError(
            f"--eval_batch_size={agreed.eval_batch_size} cannot be split evenly over"
            f" {replicas} devices"
        )
    wanted = {"layers": agreed.layers, "max_length": agreed.max_length}
    hot_start.check(agreed, local, "the MLM head is", wanted)


def _check_clusters(agreed: Agreed) -> None:
    """Raises errors.NebulaError at clusters, or parts of them, that cannot be."""
    if not 1 <= agreed.clusters <= MOST_CLUSTERS:
        raise errors.SettingsError(
            f"--clusters={agreed.clusters}: expected 1 to {MOST_CLUSTERS}"
        )
    if [each.strip() for each in agreed.languages] != [text.ALL]:
        groups = len(agreed.groups())
        if groups not in (1, agreed.clusters):
            raise errors.SettingsError(
                f'--languages="{" ".join(agreed.languages)}" has {groups} groups: give'
                " one, for every cluster, or one for each of"
                f" --clusters={agreed.clusters}"
            )


def _check_training(run: Run) -> None:
    """Raises errors.SettingsError at a start or a pipeline that cannot be."""
    agreed, local = run.agreed, run.local
    agreed.start()
    if local.pipeline and local.fsdp == 1:
        raise errors.SettingsError(
            f"--pipeline={local.pipeline} needs --fsdp=S: its stages are the devices of"
            " a group"
        )
    if local.pipeline and agreed.trains != "all":
        raise errors.SettingsError(
            f"--pipeline={local.pipeline} is not for --trains={agreed.trains}: adapters"
            " stand between the layers that it would take as its stages"
        )


def settings(run: Run, vocabulary: vocabularies.Vocabulary) -> dict[str, Any]:
    """Returns what a Hello compares, and a checkpoint is checked against."""
    return shared_vocabulary.compared(run.agreed, run.local, vocabulary)


def model(agreed: Agreed, encoder: transformer.Config) -> bert.Config:
    """Returns the configuration of a model of this shape, and of its training."""
    return bert.Config(
        encoder=encoder,
        warmup=min(1.0, agreed.warmup_steps / agreed.steps),
        start=agreed.start(),
        **fields.common(agreed, bert.Config),
    )
