"""The configuration of an M3 run: its flags, and the values that are passed on."""

import dataclasses
import functools
import pathlib
from typing import Any

from absl import flags

import nebula_jax
from experiments import command_line, configuration
from nebula_jax import errors
from nebula_jax.communication.wire import frames, spool
from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.models.pretrained import config_json, packages
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.runtime import devices, process
from nebula_jax.training import m3, masking

flags.DEFINE_string(
    "generators",
    "2",
    'Languages of each generator, as in "en de|hi ur"; or a number K, for the grouping'
    " of K generators in the text folder's mono/families.json.",
)
flags.DEFINE_integer(
    "window",
    2,
    "Steps that a generator may be ahead of the discriminator; 0 takes turns.",
    lower_bound=0,
)
flags.DEFINE_string(
    "fan_out",
    "1",
    "Micro-batches of --batch_size rows that a generator makes in a step, each sent as"
    " soon as it is made, for as many replicas of the discriminator; auto measures both"
    " sides before the first step, and chooses.",
)
flags.DEFINE_list(
    "emulate_compute",
    [],
    "Milliseconds that stand in for the compute of a larger model: every process sleeps"
    " them, G for each micro-batch of a generator and D for each step of the"
    " discriminator, as in 50,400. For timings on machines that are too small.",
)
flags.DEFINE_string(
    "spool",
    "0",
    "Bytes, such as 2GB, that a generator keeps while the line is down or too slow, to"
    " go on to the end of --window. What exceeds 256 MB of them waits in a file in its"
    " folder of --workdir. 0 for as much as is under way on a good line.",
)
flags.DEFINE_string(
    "task_mix",
    "mrtd=1 trtd=1",
    "Weights of the tasks of every generator, or of each, as in"
    ' "mrtd|trtd|mrtd=1 trtd=3": mrtd reads single languages, trtd translations.',
)
flags.DEFINE_string(
    "vocabulary",
    "",
    "File of the sentencepiece model that all clusters share, or with --hot_start the"
    " folder of its trimmed tokenizer. If empty, --cluster=all and --cluster=whole make"
    " one from the text, of --vocab_size pieces.",
)
flags.DEFINE_integer(
    "vocab_size",
    8000,
    "Pieces of a vocabulary that is trained here; with --hot_start, pieces of the"
    " tokenizer that are kept, the most frequent in the text.",
    lower_bound=32,
)
flags.DEFINE_integer(
    "vocab_lines",
    200_000,
    "Largest number of sentences to train the vocabulary on.",
    lower_bound=1,
)
flags.DEFINE_enum(
    "generator_size", "tiny", list(transformer.SIZES), "Size of each generator."
)
flags.DEFINE_enum(
    "discriminator_size", "mini", list(transformer.SIZES), "Size of the discriminator."
)
flags.DEFINE_string(
    "hot_start",
    "",
    "Encoder that generators and discriminator begin with (section 4.1): a name of"
    " scripts/prepare_pretrained.py, or a checkpoint folder. If empty, random weights"
    " of --generator_size and --discriminator_size.",
)
flags.DEFINE_integer(
    "generator_layers",
    0,
    "Layers of a generator, the first ones of --hot_start; 0 for a quarter of these, or"
    " without it for those of --generator_size.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "discriminator_layers",
    0,
    "Layers of the discriminator, the first ones of --hot_start; 0 for all of these, or"
    " without it for those of --discriminator_size.",
    lower_bound=0,
)
flags.DEFINE_float(
    "temperature",
    1.0,
    "Temperature of the generators' samples. Where a generator guesses well and so"
    " makes few fakes, above 1 it makes more; below 1 fakes are harder to detect.",
    lower_bound=0.01,
)
flags.DEFINE_integer("max_length", 64, "Tokens of a sequence.", lower_bound=8)
flags.DEFINE_float(
    "mask_rate", 0.15, "Share of tokens masked.", lower_bound=0.01, upper_bound=0.9
)
flags.DEFINE_enum(
    "mask_policy",
    "electra",
    list(masking.POLICIES),
    "Pieces at masked positions: mask (always [MASK]), electra (15 % kept), bert"
    " (10 % random, 10 % kept).",
)
flags.DEFINE_float(
    "rtd_weight", 50.0, "Weight of the RTD loss, λ of eq. 11.", lower_bound=0.0
)
flags.DEFINE_float(
    "clm_weight", 1.0, "Weight of the CLM loss, γ of eq. 11.", lower_bound=0.0
)
flags.DEFINE_float(
    "mono_alpha", 0.3, "Sampling exponent of single languages.", lower_bound=0.0
)
flags.DEFINE_float(
    "parallel_alpha", 0.7, "Sampling exponent of translations.", lower_bound=0.0
)
flags.DEFINE_integer(
    "eval_batches", 2, "Held-out batches of each language.", lower_bound=1
)

AUTO = "auto"
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
class Agreed(configuration.Agreed):
    """The settings that all clusters share; `batch_size` is of each generator."""

    generators: str
    """Languages of each generator: "en de|hi ur"."""
    task_mix: str
    window: int
    """Steps that a generator may be ahead."""
    fan_out: str
    """Micro-batches of a generator's step, n; or `auto`."""
    generator_size: str
    discriminator_size: str
    generator_layers: int
    """0 for a quarter of --hot_start's, or those of the size."""
    discriminator_layers: int
    """0 for all of --hot_start's, or those of the size."""
    max_length: int
    """L, tokens."""
    dtype: str
    dropout: float
    mask_rate: float
    """Share of tokens; 0.15 in section 4.1."""
    mask_policy: str
    temperature: float
    rtd_weight: float
    """λ of eq. 11."""
    clm_weight: float
    """γ of eq. 11."""
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

    def groups(self) -> list[list[str]]:
        """Returns the languages of each generator."""
        return language_mixture.parse_groups(self.generators)

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
    spool: str
    """Bytes, such as 2GB, that a generator keeps while the line is down."""
    emulate_compute: tuple[int, ...]
    """Milliseconds of a generator's micro-batch and a discriminator's step; or none."""
    hot_start: str
    """A name or a folder; empty for random weights."""
    mono_alpha: float
    parallel_alpha: float

    def emulated_seconds(self) -> tuple[float, float]:
        """Returns --emulate_compute in seconds, or zeros."""
        generator, discriminator = self.emulate_compute or (0, 0)
        return generator / 1000, discriminator / 1000


Run = configuration.Run[Agreed, Local]

FLAGS = configuration.names(Agreed, Local)


def from_flags() -> Run:
    """Returns the flags as values; for `main`."""
    return Run(configuration.read(Agreed), configuration.read(Local))


def with_groups(run: Run, groups: list[list[str]]) -> Run:
    """Returns the run with the languages of each generator written out."""
    return run.with_agreed(generators=language_mixture.format_groups(groups))


def check(run: Run) -> None:
    """Raises errors.NebulaError at what cannot work, before anything starts."""
    agreed, local = run.agreed, run.local
    if spool.from_string(local.spool) and not agreed.window:
        raise errors.SettingsError(
            f"--spool={local.spool} needs --window above 0: generators that take turns"
            " with the discriminator have nothing to send while the line is down"
        )
    if local.emulate_compute:
        if len(local.emulate_compute) != 2:
            given = ",".join(map(str, local.emulate_compute))
            raise errors.SettingsError(
                f"--emulate_compute={given}: expected two numbers, as in 50,400"
            )
        if local.cluster == "whole":
            raise errors.SettingsError("--emulate_compute is not for --cluster=whole")
        process.message(EMULATED.format(*local.emulate_compute))
    number = command_line.whole_number(agreed.fan_out)
    if agreed.fan_out != AUTO and not number:
        raise errors.SettingsError(
            f"--fan_out={agreed.fan_out}: expected a number from 1, or auto"
        )
    if agreed.fan_out == AUTO and local.cluster == "whole":
        raise errors.SettingsError(
            "--fan_out=auto measures two clusters; with --cluster=whole give a number"
        )
    devices.check(local.layout(), agreed.batch_size, agreed.micro_batches)
    if not local.hot_start:
        return
    folder = hot_start_folder(local)
    about = checkpoint_folder.read_config(folder)
    _, config = config_json.read(about, folder / checkpoint_folder.CONFIG)
    if config.embedding_width:
        raise errors.SettingsError(
            f"--hot_start={local.hot_start}: its embeddings are narrower than its"
            " layers; the heads of eq. 6 and 10 are tied to embeddings as wide"
        )
    for name, wanted, there in (
        ("generator_layers", agreed.generator_layers, config.layers),
        ("discriminator_layers", agreed.discriminator_layers, config.layers),
        ("max_length", agreed.max_length, config.max_length),
    ):
        if wanted > there:
            raise errors.SettingsError(
                f"--{name}={wanted}: --hot_start={local.hot_start} has {there}"
            )


def hot_start_folder(local: Local) -> pathlib.Path:
    """Returns the checkpoint folder of --hot_start, fetched if need be.

    Raises:
      errors.NebulaError: if it cannot be had.
    """
    return _resolved(local.hot_start, local.pretrained_dir)


@functools.cache  # a package's files are hashed each time: half a gigabyte
def _resolved(name: str, pretrained_dir: pathlib.Path) -> pathlib.Path:
    return packages.resolve_checkpoint(name, pretrained_dir, process.message)


_digest = functools.cache(checkpoint_folder.digest)


def settings(run: Run, vocabulary: vocabularies.Vocabulary) -> dict[str, Any]:
    """Returns what a Hello compares, and a checkpoint is checked against."""
    values = configuration.settings(run.agreed)
    values["vocabulary"] = vocabulary.digest[:16]
    if run.local.hot_start:
        # Clusters may have it in different places.
        values["--hot_start"] = _digest(hot_start_folder(run.local))[:16]
    return values


def hello(run: Run, settings: dict[str, Any], checkpoints: list[int]) -> frames.Hello:
    """Returns this cluster's Hello."""
    version = nebula_jax.__version__
    return frames.Hello(run.local.cluster, version, settings, tuple(checkpoints))


def model(
    agreed: Agreed, generator: transformer.Config, discriminator: transformer.Config
) -> m3.Config:
    """Returns the configuration of both models and their training."""
    return m3.Config(
        generator=generator,
        discriminator=discriminator,
        **{
            name: getattr(agreed, name)
            for name in (
                *("steps", "mask_rate", "mask_policy", "temperature", "rtd_weight"),
                *("clm_weight", "learning_rate", "warmup_steps", "weight_decay"),
                *("clip_norm", "micro_batches"),
            )
        },
    )
