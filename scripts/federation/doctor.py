"""The command doctor: what is in order here and on the way to others, and what is not.

It changes nothing, and ends no line: to another switch it connects without a
certificate, as a lab does that joins.
"""

import argparse
import socket
import sys
import time

from nebula_jax import errors
from nebula_jax.communication import endpoints
from nebula_jax.federation import joining
from nebula_jax.security.membership import checkup, member, site_folder
from nebula_jax.security.membership.checkup import FINE, WRONG, Check
from nebula_jax.security.tls import between_labs
from scripts.federation import arguments, running

SECONDS = 5.0  # for each step of reaching another switch


@arguments.command(
    "doctor",
    arguments.option(
        "--peer",
        action="append",
        default=[],
        metavar="LAB=HOST:PORT",
        help="another lab and its switch, to reach; several times for several (default:"
        " the one where this lab joined)",
    ),
)
def doctor(given: argparse.Namespace) -> int:
    """Checks this lab and its way to others: exit status 1 if something is wrong."""
    folder = arguments.folder(given)
    peers = [arguments.peer(each) for each in given.peer]
    bad = _print(checkup.folder(folder))
    try:
        authority = folder.load().authority
    except errors.NebulaError:
        pass  # `checkup.folder` has reported it
    else:
        if not peers and authority:
            first = member.issuing_lab(member.pinned_authority(folder))
            peers = [(first, endpoints.host_and_port("peer", authority))]
        bad += _print(switch(folder))
        for lab, address in peers:
            bad += _print(reach(folder, lab, address))
    print(f"{bad} to look at" if bad else "all is in order")
    return 1 if bad else 0


def _print(checks: list[Check]) -> int:
    """Prints checks as they are made; returns how many found something wrong."""
    for each in checks:
        print(each)
    sys.stdout.flush()  # the next ones may take seconds
    return sum(each.state == WRONG for each in checks)


def switch(folder: site_folder.Folder) -> list[Check]:
    """Checks the switch of this lab, and its lines to others."""
    try:
        return running.of_switch(folder)
    except errors.NebulaError as error:
        return [Check("switch", WRONG, str(error))]


def reach(
    folder: site_folder.Folder, lab: str, address: tuple[str, int]
) -> list[Check]:
    """Checks the way to the switch of another lab."""
    what, checks = endpoints.written(address), list[Check]()
    try:
        began = time.monotonic()
        with socket.create_connection(address, SECONDS) as sock:
            text = f"answers after {1e3 * (time.monotonic() - began):.1f} ms (TCP)"
            checks.append(Check(what, FINE, text))
            if what == folder.load().authority:
                checks += _clock(what)
            checks.append(_handshake(folder, what, lab, sock))
    except (errors.NebulaError, OSError) as error:
        checks.append(Check(what, WRONG, _why(error, is_connected=bool(checks))))
    return checks


def _clock(what: str) -> list[Check]:
    """Compares this machine's clock with the authority's."""
    try:
        ahead = joining.clock_ahead(what)
    except (errors.NebulaError, OSError):
        return []  # the handshake shows what is wrong
    return [checkup.clocks(ahead, "that one")]


def _why(error: Exception, is_connected: bool) -> str:
    """Returns why there is no TLS with another switch, and what to do."""
    if isinstance(error, TimeoutError):
        return (
            f"no answer in {SECONDS:.0f} s: something else listens there, a firewall"
            " drops it, or the machine is off; let the port through, or dial from the"
            " other side"
        )
    if is_connected:
        return f"no TLS with it ({between_labs.reason_of(error)}): {error}"
    if isinstance(error, socket.gaierror):
        return f"no machine has this name: {error.strerror}"
    if isinstance(error, ConnectionRefusedError):
        return (
            "nothing listens there: run nebula switch --listen at that lab, or correct"
            " the port"
        )
    return f"cannot be reached: {error}"


def _handshake(
    folder: site_folder.Folder, what: str, lab: str, sock: socket.socket
) -> Check:
    """Shakes hands without a certificate, and finds out whose switch it is."""
    context, _ = between_labs.joining_context(member.pinned_authority(folder))
    context.check_hostname = False  # it is named
    sock.settimeout(SECONDS)
    began = time.monotonic()
    with context.wrap_socket(sock) as secure:
        took = time.monotonic() - began
        peer = between_labs.check_peer(secure.getpeercert(True), folder)
        left = checkup.duration(peer.end - site_folder.utc_now())
        name = site_folder.dns_name(peer.lab, peer.role)
        text = f"TLS after {1e3 * took:.1f} ms, certificate of {name}, for {left} more"
        if name != lab:
            return Check(what, WRONG, f"{text}: not the switch of {lab}")
        return Check(what, FINE, text)
