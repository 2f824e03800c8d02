"""The kernel's measurements of a connection."""

import pathlib
import re
import socket
import struct

import pytest

from nebula_jax.federation import tcp_info

HEADER = pathlib.Path("/usr/include/linux/tcp.h")
SIZES = {"__u8": 1, "__u32": 4, "__u64": 8}


def test_a_connection_is_measured():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        here.sendall(bytes(100_000))
        left = 100_000
        while left:
            left -= len(there.recv(left))
        found = tcp_info.read(here)
    assert found is not None
    assert 0 < found.round_trip < 1
    assert found.resent == 0
    assert found.rate is None or found.rate > 0


def test_each_field_is_where_the_kernel_puts_it():
    data = bytearray(tcp_info.SIZE)
    data[7] = 1
    for offset, value in ((60, 1500), (68, 20_000), (100, 3)):
        struct.pack_into("=I", data, offset, value)
    struct.pack_into("=Q", data, 160, 7_500_000)
    assert tcp_info.parse(bytes(data)) == (0.02, 1500, 3, 7_500_000.0, True)
    data[7] = 2  # another bit of the byte
    assert tcp_info.parse(bytes(data)) == (0.02, 1500, 3, 7_500_000.0, False)
    assert tcp_info.parse(bytes(data[:104])) == (0.02, 1500, 3, None, False)
    assert tcp_info.parse(bytes(data[:103])) is None


@pytest.mark.skipif(not HEADER.exists(), reason="no headers of the kernel here")
def test_the_offsets_are_those_of_the_header():
    text = HEADER.read_text().partition("struct tcp_info {")[2].partition("};")[0]
    offsets, offset = {}, 0
    for kind, name in re.findall(r"(__u\d+)\s+(tcpi_\w+)\s*[;:]", text):
        if kind == "__u8":
            continue  # the first eight bytes, some of them in bits
        offset = offset or 8
        offsets[name] = offset
        offset += SIZES[kind]
    wanted = {"pmtu": 60, "rtt": 68, "total_retrans": 100, "delivery_rate": 160}
    assert {name: offsets[f"tcpi_{name}"] for name in wanted} == wanted


def test_what_is_no_tcp_connection_is_not_measured():
    here, there = socket.socketpair()
    with here, there:
        assert tcp_info.read(here) is None
