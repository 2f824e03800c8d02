import re

import pytest

from nebula_jax import errors
from nebula_jax.communication import endpoints


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("[::1]:70", ("::1", 70)),
        ("[::]:7070", ("::", 7070)),
        ("[fe80::1%eth0]:7070", ("fe80::1%eth0", 7070)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("a.example.org:65535", ("a.example.org", 65535)),
    ],
)
def test_addresses_are_read_and_written_alike(value, address):
    assert endpoints.host_and_port("peer", value) == address
    assert endpoints.written(address) == value


@pytest.mark.parametrize(
    "value",
    [
        *("h:²", "h:٧", "h:+7", "h:" + "9" * 5000, "h h:7", ":7", "h:"),
        *("::1:7070", "[::1:7070", "[h]:7070", "[]:7070", "[[::1]]:70"),
    ],
)
def test_what_is_no_address_is_refused(value):
    words = f"listen={value}: expected HOST:PORT"
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        endpoints.host_and_port("listen", value)


def test_several_addresses_have_commas_between_them():
    found = endpoints.hosts_and_ports("peer", "a.example:7070,[::1]:7071")
    assert found == [("a.example", 7070), ("::1", 7071)]
    assert endpoints.hosts_and_ports("peer", "") == []
    for value in (",", "h:1,", "h:1,h", "h:1;h:2"):
        with pytest.raises(errors.SettingsError, match="expected HOST:PORT"):
            endpoints.hosts_and_ports("peer", value)
