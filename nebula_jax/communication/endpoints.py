"""Addresses as one writes them, HOST:PORT, and sockets that listen there."""

import contextlib
import ipaddress
import re
import socket

from nebula_jax import errors

BACKLOG = 1024  # connections that wait to be accepted; the system drops others
IDLE_SECONDS = 10  # of silence before the first probe
PAUSE_SECONDS = 5  # between probes
PROBES = 3  # without an answer: the connection ends, before a peer's absence ends a run


class CannotListen(errors.NebulaError):
    """A port that is in use, or an address that is not this machine's."""


def written(address: tuple[str, int]) -> str:
    """Returns an address as one writes it: `example.org:7070`, `[::1]:7070`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(name: str, value: str) -> tuple[str, int]:
    """Parses `HOST:PORT`, `[::]:PORT` or `[fe80::1%eth0]:PORT`.

    Raises errors.SettingsError naming the argument, if it is none.
    """
    host, _, port = value.rpartition(":")
    try:
        if host.startswith("[") and host.endswith("]"):
            host = str(ipaddress.IPv6Address(host[1:-1]))
        elif not host or re.search(r"[\s:\[\]/%@]", host):
            raise ValueError
        if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
            raise ValueError
    except ValueError:
        raise errors.SettingsError(
            f"{name}={value}: expected HOST:PORT, with an IPv6 address in brackets"
        ) from None
    return host, int(port)


def hosts_and_ports(name: str, value: str) -> list[tuple[str, int]]:
    """Parses addresses with commas between them, as above; none in an empty text."""
    return [host_and_port(name, each) for each in value.split(",") if value]


def listen(address: tuple[str, int]) -> socket.socket:
    """Returns a bound and listening socket; at `::` for IPv6 and, if it can be, IPv4.

    Raises CannotListen if the port is in use, or the host is not this machine's.
    """
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        found.sort(key=lambda each: each[0] != socket.AF_INET)  # of a name with both
        family, _, _, _, where = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_dual)
            sock.bind(where)  # which has the zone of fe80::1%eth0
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CannotListen(f"cannot listen on {written(address)}: {reason}") from None
    return sock


def keep_alive(sock: socket.socket) -> None:
    """Has the kernel end a TCP connection whose other host answers nothing for 25 s.

    A host without power sends no end of its connections. The kernel's own patience is
    two hours, for which a trainer that is gone would keep its place.
    """
    with contextlib.suppress(OSError):  # it has ended already
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PAUSE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
