"""Addresses as flags have them: HOST:PORT."""

import ipaddress
import re

from nebula_jax import errors


def host_and_port(flag: str, value: str) -> tuple[str, int]:
    """Parses `HOST:PORT`, `[::]:PORT` or `[fe80::1%eth0]:PORT`.

    Args:
      flag: where it is from, for the error.
      value: the text.

    Raises:
      errors.SettingsError: if it is none.
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
            f"{flag}={value}: expected HOST:PORT, with an IPv6 address in brackets"
        ) from None
    return host, int(port)


def hosts_and_ports(flag: str, value: str) -> list[tuple[str, int]]:
    """Parses addresses with commas between them; none if the text is empty.

    Args:
      flag, value: as for `host_and_port`.

    Raises:
      errors.SettingsError: if one of them is none.
    """
    return [host_and_port(flag, each) for each in value.split(",") if value]
