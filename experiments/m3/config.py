"""The configuration of an M3 run: its flags, and the values that are passed on."""

import dataclasses
import functools
import pathlib
from typing import Any

from experiments import configuration, shared_flags
from experiments.pretraining import config as pretraining_config
from experiments.pretraining import hot_start
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import m3

EMULATED = (
    "--emulate_compute: sleeps of {} ms for a generator's micro-batch and {} ms for a"
    " step of the discriminator stand in for a larger model; only the rest is measured"
)

DEFAULTS = {
    "learning_rate": 1e-4,
    "warmup_steps": 10_000,
    "eval_every": 500,
    "job": "pretrain_m3",
}
"""Shared flags that have another default in this experiment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(pretraining_config.Agreed):
    """The settings that all clusters share; `batch_size` is of each generator."""

    generators: str = fields.to_begin_with(
        "2",
        "Languages of each generator, or a number K for the grouping of K generators in"
        " the text folder's mono/families.json.\n"
        '"en de|hi ur": parts for generators, languages in them.',
    )
    window: int = fields.of_line(
        2, "Steps that a generator may be ahead of the discriminator; 0 takes turns."
    )
    fan_out: int = fields.of_training(
        1,
        "Micro-batches of --batch_size rows that a generator makes in a step, each sent"
        " as soon as it is made, for as many replicas of the discriminator.",
        lower=1,
    )
    generator_size: str = fields.of_model(
        "tiny", "Size of each generator.", choices=list(transformer.SIZES)
    )
    discriminator_size: str = fields.of_model(
        "mini", "Size of the discriminator.", choices=list(transformer.SIZES)
    )
    generator_layers: int = fields.of_model(
        0,
        "Layers of a generator, the first ones of --hot_start; 0 for a quarter of these"
        " (with --generator_start for all of its), or without it for those of"
        " --generator_size.",
    )
    discriminator_layers: int = fields.of_model(
        0,
        "Layers of the discriminator, the first ones of --hot_start; 0 for all of"
        " these, or without it for those of --discriminator_size.",
    )
    temperature: float = fields.of_training(
        1.0,
        "Temperature of the generators' samples. Where a generator guesses well and so"
        " makes few fakes, above 1 it makes more; below 1 fakes are harder to detect.",
        lower=0.01,
    )
    rtd_weight: float = fields.of_training(
        50.0, "Weight of the RTD loss, λ of eq. 11.", source="section 4.1"
    )
    clm_weight: float = fields.of_training(
        1.0, "Weight of the CLM loss, γ of eq. 11.", source="section 4.1"
    )

    disentangled: bool = fields.for_experts(
        False,
        "Let the discriminator read its CLM head's embeddings without sending them a"
        " gradient, plus deltas of their own (DeBERTaV3's GDES, within a cluster).",
    )

    def groups(self) -> list[list[str]]:
        """Returns the languages of each generator."""
        return language_mixture.parse_groups(self.generators)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(pretraining_config.Local):
    """The settings that each cluster chooses for itself.

    `emulate_compute` is of a generator's micro-batch and of a discriminator's step.
    """

    generator_start: str = fields.of_model(
        "",
        "Encoder that every generator begins with, if it is not --hot_start's: named"
        " as there. Its tokenizer has the same pieces.",
    )
    discriminator_start: str = fields.of_model(
        "", "Encoder that the discriminator begins with, if it is not --hot_start's."
    )
    init_from: str
    probe_pairs: int = fields.of_run(
        32,
        "Pairs of translations of each language, from the dev text in --data_dir, on"
        " which the discriminator's cluster measures at every evaluation how near"
        " translations lie in its encoder; 0 for none. Without such text there it"
        " measures none.",
    )

    def of_generator(self) -> "Local":
        """Returns the settings with the generators' start as --hot_start."""
        start = self.generator_start or self.hot_start
        return dataclasses.replace(self, hot_start=start)

    def of_discriminator(self) -> "Local":
        """Returns the settings with the discriminator's start as --hot_start.

        Its tokenizer is the run's vocabulary.
        """
        start = self.discriminator_start or self.hot_start
        return dataclasses.replace(self, hot_start=start)


Run = configuration.Run[Agreed, Local]

FLAGS = fields.define(Agreed, Local, shared_flags.Command)


def from_flags() -> Run:
    """Returns the flags as values; for `main`."""
    return Run(fields.read(Agreed), fields.read(Local))


def context(run: Run, part: int) -> context_lib.Context:
    """Returns a loop's context: part 0 is a generator's, part 1 the discriminator's."""
    emulated = run.local.emulate_compute or (0, 0)
    return run.context(emulated_seconds=emulated[part] / 1000)


def mixes(
    agreed: Agreed, groups: list[list[str]]
) -> list[language_mixture.TaskWeights]:
    """Returns the task weights of each generator."""
    pairs = agreed.parallel_pairs
    return language_mixture.parse_tasks(agreed.task_mix, groups, pairs=pairs)


def with_groups(run: Run, groups: list[list[str]]) -> Run:
    """Returns the run with the languages of each generator written out."""
    return run.with_agreed(generators=language_mixture.format_groups(groups))


def check(run: Run) -> None:
    """Raises errors.NebulaError at what cannot work, before anything starts."""
    agreed, local = run.agreed, run.local
    if local.emulate_compute:
        if len(local.emulate_compute) != 2:
            given = ",".join(map(str, local.emulate_compute))
            raise errors.SettingsError(
                f"--emulate_compute={given}: expected two numbers, as in 50,400"
            )
        if local.cluster == "whole":
            raise errors.SettingsError("--emulate_compute is not for --cluster=whole")
        process.message(EMULATED.format(*local.emulate_compute))
    agreed.start()
    devices.check(local.layout(), agreed.batch_size, agreed.micro_batches)
    starts = local.of_generator(), local.of_discriminator()
    if agreed.disentangled and starts[1].hot_start:
        raise errors.SettingsError(
            "--disentangled is for a discriminator that begins with random weights, not"
            " for --hot_start or --discriminator_start"
        )
    if bool(starts[0].hot_start) != bool(starts[1].hot_start):
        raise errors.SettingsError(
            "--generator_start and --discriminator_start go together: give both, or"
            " --hot_start for the one that is left out"
        )
    for start, name in zip(starts, ("generator", "discriminator"), strict=True):
        layers = {f"{name}_layers": getattr(agreed, f"{name}_layers")}
        wanted = {**layers, "max_length": agreed.max_length}
        hot_start.check(agreed, start, "the heads of eq. 6 and 10 are", wanted)


def names(agreed: Agreed) -> list[str]:
    """Returns the names of all clusters; the first one listens, the others dial it."""
    generators = range(len(agreed.groups()))
    return ["discriminator", *(f"generator:{index}" for index in generators)]


def settings(run: Run, vocabulary: vocabularies.Vocabulary) -> dict[str, Any]:
    """Returns what a Hello compares, and a checkpoint is checked against."""
    local = run.local
    found = shared_vocabulary.compared(run.agreed, local.of_discriminator(), vocabulary)
    if local.generator_start or local.discriminator_start:
        digest = hot_start.digest(local.of_generator())
        found["--generator_start"] = digest[:16]
    if local.init_from:  # whose folder may be elsewhere in each cluster
        found[checkpoints.INIT_FROM] = f"step {earlier_step(run)}"
    return found


def earlier_step(run: Run) -> int:
    """Returns the step of --init_from that a run has begun with.

    Before its first checkpoint that is the newest one that this process's clusters have
    there. Raises errors.NebulaError if there is none.
    """
    begun = begun_step(run)
    return _newest(run.local.init_from, _parts(run)) if begun is None else begun


def begun_step(run: Run) -> int | None:
    """Returns the step of --init_from that a run's own checkpoints name, if any."""
    return checkpoints.begun_step(run.local.workdir, _parts(run))


def _parts(run: Run) -> tuple[str, ...]:
    cluster = run.local.cluster
    return tuple(names(run.agreed)) if cluster in ("all", "whole") else (cluster,)


@functools.cache  # digests of all its files
def _newest(folder: str, parts: tuple[str, ...]) -> int:
    return checkpoints.newest_in_all(pathlib.Path(folder), parts)


def model(
    agreed: Agreed, generator: transformer.Config, discriminator: transformer.Config
) -> m3.Config:
    """Returns the configuration of both models and their training."""
    return m3.Config(
        generator=generator,
        discriminator=discriminator,
        start=agreed.start(),
        **fields.common(agreed, m3.Config),
    )
