"""The commands about the running switch: switch, status, rotate."""

import argparse
import asyncio
import shlex
import signal
import socket
import sys
import time

from nebula_jax import printable
from nebula_jax.communication import endpoints
from nebula_jax.federation import issuer, server, trainer_keys
from nebula_jax.runtime.life import process
from nebula_jax.security import private_files
from nebula_jax.security.membership import site_folder
from nebula_jax.security.membership.checkup import Check
from scripts.federation import arguments

SECONDS = 10.0  # for the switch to answer


@arguments.command(
    "switch",
    arguments.option(
        "--listen",
        metavar="HOST:PORT",
        help="where other labs' switches connect; not behind a NAT",
    ),
    arguments.option(
        "--peer",
        action="append",
        default=[],
        metavar="LAB=HOST:PORT",
        help="another lab and its switch, to connect to; several times for several",
    ),
    arguments.option(
        "--inside",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where trainers of this lab connect (default: this machine alone)",
    ),
    arguments.file_option(
        "--socket", "to make, where users of this host with an account connect"
    ),
    arguments.option(
        "--authority",
        default="",
        metavar="COMMAND",
        help="that runs the authority as another user, such as `sudo -u ca nebula"
        " authority` (default: as this one)",
    ),
)
def switch(given: argparse.Namespace) -> int:
    """Runs the switch of this lab, until it is stopped."""
    if not given.listen and not given.peer:
        raise arguments.InputError(
            "nebula switch needs --listen HOST:PORT, or --peer LAB=HOST:PORT, or both"
        )
    private_files.keep_out_of_core_dumps()
    folder = arguments.folder(given)
    authority = None
    if not folder.load().authority:
        own = [sys.executable, "-m", "scripts.nebula", "authority"]
        command = shlex.split(given.authority) or [*own, f"--federation={folder.path}"]
        authority = issuer.Process(command)
    made = server.Switch(folder, process.message, authority and authority.ask)
    made.socket = given.socket
    peers = [arguments.peer(each) for each in given.peer]
    outside = given.listen and endpoints.listen(
        endpoints.host_and_port("listen", given.listen)
    )
    inside = endpoints.listen(endpoints.host_and_port("inside", given.inside))
    asyncio.run(_run(made, authority, outside or None, peers, inside))
    return 0


async def _run(
    made: server.Switch,
    authority: issuer.Process | None,
    outside: socket.socket | None,
    peers: list[tuple[str, tuple[str, int]]],
    inside: socket.socket,
) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, made.stop)

    def started() -> None:
        where = [f"trainers connect to {endpoints.written(inside.getsockname()[:2])}"]
        if outside is not None:
            where.append(f"labs to {endpoints.written(outside.getsockname()[:2])}")
        print(f"the switch of {made.state.lab} runs: {', '.join(where)}", flush=True)

    try:
        await made.run(outside, peers, inside, started)
    finally:
        if authority is not None:
            await authority.close()


@arguments.command("status")
def status(given: argparse.Namespace) -> int:
    """Shows who is connected, and who waits for whom."""
    for each in of_switch(arguments.folder(given)):
        print(printable.line(f"{each.what}: {each.text}", printable.LINE_LIMIT))
    return 0


def of_switch(folder: site_folder.Folder) -> list[Check]:
    """Returns what the running switch says of itself; raises NebulaError without."""
    found = arguments.request(folder, SECONDS, "status")
    return [Check(*each) for each in found["checks"]]


@arguments.command("rotate")
def rotate(given: argparse.Namespace) -> int:
    """Replaces the certificates of this lab now."""
    began = time.monotonic()
    folder, whose = arguments.folder(given), "the switch"
    arguments.request(folder, arguments.REQUEST_SECONDS, "rotate")
    if folder.trainers.exists():
        trainer_keys.renew(folder)
        whose += " and the trainers"
    seconds = time.monotonic() - began
    print(f"the certificates of {whose} are new, after {seconds:.1f} s")
    return 0
