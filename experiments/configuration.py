"""The configuration of a run: flags as values that are passed on, and as flags again.

An experiment's `config.py` has two frozen dataclasses, of whose fields its flags are
made (see `fields`): `Agreed`, the settings that all clusters of a run must share, and
`Local`, those that each cluster chooses for itself. `fields.read` fills them in `main`;
from there on they are passed. `arguments` turns them back into flags, for a process of
the run or for its `run.flags`.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from absl import flags

import nebula_jax
from nebula_jax import errors, files
from nebula_jax.commands import cluster_flags, command_line, fields
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import frames
from nebula_jax.models import transformer
from nebula_jax.models.pretrained import packages
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints, report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed(cluster_flags.Agreed):
    """The settings that all clusters of a run share and a checkpoint is checked for."""

    batch_size: int = fields.to_begin_with(
        16, "Examples of a step, in each cluster with text.", lower=1
    )
    micro_batches: int = fields.of_training(
        1,
        "Parts of a batch, one after the other, whose gradients are added up: less"
        " memory, and with train_abnet they overlap on the line.",
        lower=1,
    )
    dtype: str = fields.of_training(
        "float32",
        "Type of the operands of matrix products; sums are float32.",
        choices=list(transformer.DTYPES),
    )
    learning_rate: float = fields.to_begin_with(1e-4, "Peak learning rate.")
    eval_every: int = fields.of_run(
        500, "Steps between evaluations on held-out text.", lower=1
    )

    def is_evaluated(self, step: int) -> bool:
        """Returns True if held-out text is evaluated after `step`."""
        return step % self.eval_every == 0 or step == self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(cluster_flags.Place):
    """The files and devices of a process of any run, and what it reports."""

    data_dir: str = fields.to_begin_with(
        "package:django",
        "Text folder (see experiments/m3/README.md), or package:django.",
    )
    prepared_dir: pathlib.Path = fields.of_data(
        "prepared", "Folder where tokenized corpora are kept between runs."
    )
    pretrained_dir: pathlib.Path = fields.of_model(
        "pretrained", "Folder of prepared models, a folder for each."
    )
    fsdp: int = fields.of_run(
        1,
        "Devices among which parameters and optimizer are split, each with its own rows"
        " of a batch: parameters are gathered where they are used.",
        lower=1,
    )
    model_parallel: int = fields.of_run(
        1,
        "Devices that share the work on the same rows: heads, inner units and the"
        " vocabulary are split among them.",
        lower=1,
    )
    remat: bool = fields.for_experts(
        False,
        "Compute the activations of a block again for its gradient: less memory on GPUs"
        " and TPUs, a third more time.",
    )

    def layout(self) -> devices.Layout:
        """Returns how the cluster uses its devices."""
        return devices.Layout(self.devices_per_cluster, self.fsdp, self.model_parallel)

    def checkpoint(self, name: str) -> pathlib.Path:
        """Returns the checkpoint folder that a flag names, fetched if need be.

        Raises errors.NebulaError if it cannot be had.
        """
        return _resolved(name, self.pretrained_dir)


@functools.cache  # a package's files are hashed each time: half a gigabyte
def _resolved(name: str, pretrained_dir: pathlib.Path) -> pathlib.Path:
    return packages.resolve_checkpoint(name, pretrained_dir, process.message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(cluster_flags.Reach, Place):
    """The settings that one cluster of a run chooses for itself."""


fields.define(Agreed, Local)

SHAPING = ("generators", "task_mix", "max_length", "pair", "bottleneck")
"""Flags beside those of the model that an earlier run's parameters go with."""

AgreedT = TypeVar("AgreedT", bound=Agreed)
LocalT = TypeVar("LocalT", bound=Place)


@dataclasses.dataclass(frozen=True)
class Run(Generic[AgreedT, LocalT]):
    """The configuration of one process of a run, as an experiment passes it on."""

    agreed: AgreedT
    local: LocalT

    def context(self, **own: Any) -> context_lib.Context:
        """Returns a training loop's context; `own` settings come before the flags'."""
        settings = context_lib.Settings
        given = fields.common(self.agreed, settings)
        given |= fields.common(self.local, settings)
        if isinstance(self.local, Local):
            given["connection"] = self.local.connection()
        return context_lib.Context(settings(**given | own))

    def open_checkpoints(
        self,
        context: context_lib.Context,
        compared: Mapping[str, Any],
        fingerprints: Mapping[str, str] | None = None,
    ) -> checkpoints.Checkpoints:
        """Opens checkpoints as the context does, errors too, and writes `run.flags`."""
        saved = context.open_checkpoints(compared, fingerprints)
        if ranks.is_root():  # only now: it is this run that the folder holds
            write_run_flags(context.folder, self)
        return saved

    def hello(
        self, settings: Mapping[str, Any], saved: Sequence[int], **details: Any
    ) -> frames.Hello:
        """Returns the Hello of this process, with `details` that the others need.

        All have equal settings; this cluster could resume after the steps `saved`.
        """
        name, version = self.local.cluster, nebula_jax.__version__
        return frames.Hello(name, version, dict(settings), tuple(saved), details)

    def with_agreed(self, **changes: Any) -> "Run[AgreedT, LocalT]":
        """Returns the run with some shared settings changed."""
        agreed = dataclasses.replace(self.agreed, **changes)
        return dataclasses.replace(self, agreed=agreed)

    def with_local(self, **changes: Any) -> "Run[AgreedT, LocalT]":
        """Returns the run with some settings of this process changed."""
        local = dataclasses.replace(self.local, **changes)
        return dataclasses.replace(self, local=local)


def arguments(run: Run) -> list[str]:
    """Returns the flags that make the same configuration again."""
    found = []
    for part in (run.agreed, run.local):
        for each in dataclasses.fields(part):
            value = getattr(part, each.name)
            if value is None:  # not given
                continue
            if isinstance(value, bool):
                found.append(f"--{'' if value else 'no'}{each.name}")
            elif isinstance(value, tuple):
                found.append(f"--{each.name}={','.join(map(str, value))}")
            else:
                found.append(f"--{each.name}={value}")
    return found


def settings(agreed: Any) -> dict[str, Any]:
    """Returns `--name` -> value, as a Hello compares and a checkpoint keeps them."""
    return {
        f"--{name}": ",".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(agreed).items()
    }


def write_run_flags(folder: pathlib.Path, run: Run) -> None:
    """Writes `run.flags`: a flagfile that alone repeats the run."""
    lines = [f"# {report.command()}", f"# commit {report.commit()}", *arguments(run)]
    with files.writing(folder / "run.flags") as partial:
        partial.write_text("\n".join(lines) + "\n")


def parse_run(folder: str, module: str, replaced: Sequence[str] = ()) -> pathlib.Path:
    """Parses the flags of an earlier run of `module`, and this command's over them.

    `replaced` flags are in the place of the run's, unless this command has them. Raises
    errors.SettingsError if it is no such run.
    """
    path = _run_flags(folder, module)
    flags_of_run = [f"--flagfile={path}", *replaced]
    command = [sys.argv[0], *flags_of_run, *sys.argv[1:], f"--workdir={folder}"]
    with _of_this_version(path, module):
        command_line.parse(command)
    return pathlib.Path(folder)


def flags_of_run(
    folder: str | os.PathLike[str], module: str, flag: str = "run"
) -> flags.FlagValues:
    """Returns the flags of an earlier run; those of this process stay as they are.

    For a notebook, which has none. Paths are relative to where the run was started.
    Raises errors.SettingsError, which names the folder's `flag`, if it is no such run.
    """
    path = _run_flags(os.fspath(folder), module, flag)
    found = copy.deepcopy(flags.FLAGS)
    with _of_this_version(path, module):
        found([module, f"--flagfile={path}", f"--workdir={os.fspath(folder)}"])
    return found


def take_model(module: str, names: Sequence[str]) -> None:
    """Parses the flags of a model that are not given as those of --init_from's run.

    A run that resumes may have begun with one that is gone. `names` are those of this
    command's flags. Raises errors.SettingsError if it is no run of `module`.
    """
    folder, missing = flags.FLAGS["init_from"].value, []
    for flag in (flags.FLAGS[name] for name in names):
        made = getattr(flag, "setting", None)
        is_of_model = made is not None and made.group == "model"
        if not flag.present and (is_of_model or flag.name in SHAPING):
            missing.append(flag.name)
    if missing and folder and pathlib.Path(folder).is_dir():
        earlier = flags_of_run(folder, module, "init_from")
        given = [earlier[name].serialize() for name in missing]
        command_line.parse([sys.argv[0], *filter(None, given)])


def _run_flags(folder: str, module: str, flag: str = "run") -> pathlib.Path:
    """Returns the flags of a run, or of the cluster of it that is there."""
    if not folder:
        raise errors.SettingsError(f"--run is missing: the folder of a run of {module}")
    at = pathlib.Path(folder)
    for path in (at / "run.flags", *sorted(at.glob("*/run.flags"))):
        if path.is_file():
            return path
    raise errors.SettingsError(f"--{flag}={folder}: no run of {module} is there")


@contextlib.contextmanager
def _of_this_version(path: pathlib.Path, module: str) -> Iterator[None]:
    """Names the file whose flags are not those of a module."""
    try:
        yield
    except flags.Error as error:
        reason = " ".join(str(error).split())
        raise errors.SettingsError(
            f"{path} is of no run of {module} in nebula_jax {nebula_jax.__version__}:"
            f" {reason}"
        ) from None


def is_evaluation(command: Any, module: str) -> bool:
    """Returns True if a `shared_flags.Command` only evaluates a run; parses its flags.

    Raises errors.SettingsError if it is no such run, or --run stands alone.
    """
    if command.eval_only:
        parse_run(command.run, module)
    elif command.run:
        raise errors.SettingsError("--eval_only and --run=FOLDER go together")
    return command.eval_only
