"""`nebula.main`: the command of your own script, whose clusters are functions.

python my_split.py                                # all clusters, here
python my_split.py --cluster=back --listen=0.0.0.0:7070 --tls=FOLDER
python my_split.py --cluster=front --peer=back.example:7070 --tls=FOLDER
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from nebula_jax import errors
from nebula_jax.commands import cluster_flags, command_line, fields
from nebula_jax.communication import codecs, ranks
from nebula_jax.face import report
from nebula_jax.face import run as run_lib
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import launcher
from nebula_jax.runtime.ranks import cluster as cluster_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import run_folder, traces
from nebula_jax.security import names as names_lib

Role = Callable[[run_lib.Run], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(cluster_flags.Agreed, cluster_flags.Clusters, cluster_flags.Reach):
    """The flags that every script of `main` has."""

    codec: str = fields.to_begin_with(
        "",
        'Codec of what crosses, such as "int8(64)", for the script to use; empty for'
        " none.",
    )


NAMES = fields.define(Flags)


def main(
    roles: Mapping[str, Role],
    *,
    defaults: Mapping[str, Any] | None = None,
    own_flags: Sequence[str] = (),
) -> None:
    """Runs the cluster that --cluster names, or all of them here; then exits.

        if __name__ == "__main__":
            nebula.main({"front": train_front, "back": train_back})

    Args:
      roles: name -> function of a Run, which trains to the end; in a chain from the
        first part to the last. A name such as `replica:*` stands for replica:0,
        replica:1 and so on, as many as --clusters says (2 if it does not).
      defaults: of flags, in this script.
      own_flags: flags of the script that may differ between clusters, such as --data.
        All others that it defines have to be equal, as the clusters check.
    """
    flags.FLAGS["cluster"].help = (
        f"Cluster that this process is: {', '.join(roles)}; or all, which starts every"
        " one here."
    )
    # Of a command that pip has installed, the flags are those of the roles' module.
    for module in {getattr(role, "__module__", None) for role in roles.values()}:
        for each in flags.FLAGS.get_key_flags_for_module(module or ""):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], each)
    run = functools.partial(_main, roles, frozenset(own_flags))
    command_line.run(run, defaults, names=NAMES)


def _main(roles: Mapping[str, Role], own_flags: frozenset[str]) -> int:
    given, agreed = fields.read(Flags), _agreed(own_flags)
    names = _names(roles, given.clusters)
    codecs.from_string(given.codec)
    if given.cluster == "all":
        with run_folder.lock(given.workdir):
            return _all(given, names)
    if given.cluster not in names:
        raise errors.SettingsError(
            f"--cluster={given.cluster}: expected all, {', '.join(names)}"
        )
    layout = devices.Layout(given.devices_per_cluster)
    devices.simulate(layout, given.num_processes or 1)
    starred = f"{given.cluster.partition(':')[0]}:*"
    role = roles.get(given.cluster) or roles[starred]
    train = functools.partial(_train, role, given, names, agreed)
    return cluster_lib.run(given.processes(), agreed, train)


def _train(
    role: Role, given: Flags, names: Sequence[str], agreed: Mapping[str, Any]
) -> int:
    with (
        run_lib.Run(
            given.cluster,
            names,
            steps=given.steps,
            workdir=given.workdir,
            codec=given.codec,
            seed=given.seed,
            checkpoint_every=given.checkpoint_every,
            log_every=given.log_every,
            allow_nonfinite=given.allow_nonfinite,
            trace=given.trace,
            tracker=given.tracker,
            metrics_port=given.metrics_port,
            agreed=agreed,
            **fields.common(given, connect.Settings),
        ) as run,
        # Of a cluster's processes, the root alone has its folder.
        run_folder.lock(run.folder) if ranks.is_root() else contextlib.nullcontext(),
    ):
        role(run)
        return run.exit_status()


def _all(given: Flags, names: Sequence[str]) -> int:
    """Runs every cluster as a process of this machine, and reports."""
    begin = time.monotonic()
    # Which of them listen, the roles alone know: each gets a port.
    dials = {name: [each for each in names if each != name] for name in names}
    with launcher.prepared(
        given.workdir,
        names,
        given.connection(),
        restarts=given.restart,
        processes_per_cluster=given.processes_per_cluster,
        dials=dials,
    ) as launch:
        arguments = functools.partial(_arguments, given.workdir, dials)
        status = launch(_program(), arguments)
    if status == 0:
        folders = {name: run_folder.of_cluster(given.workdir, name) for name in names}
        traces.gather(given.workdir, folders.values(), given.traced)
        flags = dataclasses.asdict(given) | {"workdir": str(given.workdir)}
        seconds = time.monotonic() - begin
        report.report(given.workdir, folders, {"flags": flags}, seconds)
    return status


def _arguments(
    workdir: pathlib.Path,
    dials: Mapping[str, Sequence[str]],
    cluster: str,
    reach: connect.Settings,
) -> list[str]:
    """Returns this command's flags, and over them those of one cluster's process."""
    peer = reach.peer
    if not reach.federation:
        addresses = zip(dials[cluster], reach.peer.split(","), strict=True)
        peer = ",".join(f"{name}={address}" for name, address in addresses)
    return [
        *sys.argv[1:],
        f"--workdir={workdir}",
        f"--cluster={cluster}",
        f"--listen={reach.listen}",
        f"--peer={peer}",
        f"--tls={reach.tls}",
        "--restart=0",
        "--processes_per_cluster=1",
    ]


def _program() -> list[str]:
    """Returns what Python runs here: a module, or a file, as pip makes of a command."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    if not pathlib.Path(sys.argv[0]).is_file():
        raise errors.SettingsError(
            f"--cluster=all starts the script's file again, and {sys.argv[0]!r} is no"
            " file: call nebula.main in one"
        )
    return [sys.argv[0]]


def _names(roles: Mapping[str, Role], clusters: Sequence[str]) -> list[str]:
    count = command_line.whole_number("".join(clusters)) if clusters else 2
    starred = [name for name in roles if name.endswith(":*")]
    if clusters and not starred:
        raise errors.SettingsError(
            f"--clusters={','.join(clusters)}: this script has the clusters"
            f" {', '.join(roles)}"
        )
    if not count or count + len(roles) - len(starred) < 2:
        raise errors.SettingsError(
            f"--clusters={','.join(clusters)}: expected a number such as 3, for 2"
            " clusters or more in all"
        )
    found = []
    for name in roles:
        stem = name.removesuffix("*")
        found += [f"{stem}{n}" for n in range(count)] if name in starred else [name]
    if "all" in found:
        raise errors.SettingsError(
            "roles={'all': ...}: --cluster=all starts every cluster; choose another"
            " name"
        )
    names_lib.check(found)
    return found


def _agreed(own_flags: frozenset[str]) -> dict[str, Any]:
    """Returns the script's own flags, which all clusters have to have alike."""
    for name in own_flags:
        if name not in flags.FLAGS or name in NAMES:
            raise errors.SettingsError(
                f"own_flags=[{name!r}]: the script defines no flag of this name"
            )
    return {
        f"--{each.name}": each.value
        if not isinstance(each.value, list)
        else ",".join(map(str, each.value))
        for each in flags.FLAGS.get_key_flags_for_module(sys.argv[0])
        if each.name not in NAMES and each.name not in own_flags
    }
