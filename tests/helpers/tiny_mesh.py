"""A process of `launcher` that meets others and trains nothing; needs no library.

python -m tiny_mesh --cluster=NAME --listen=A --peer=B,C --waits=N --folder=FOLDER

dials its peers, is dialed by N clusters, and leaves whom it has met in FOLDER/NAME. The
first process of --killed that finds no file FOLDER/killed leaves it, and kills itself.
--refused waits until the port of its last peer refuses, once that has ended.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import sys
import time

SECONDS = 10.0


def read(sock):
    with sock.makefile() as stream:
        return stream.readline().strip()


def dialed(address, name):
    """Exchanges names with the one that listens at an address."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), SECONDS) as sock:
        found = read(sock)
        sock.sendall(f"{name}\n".encode())
        return found


def awaited(count, name):
    """Exchanges names with those that come to the socket that was handed down."""
    number = os.environ.get("NEBULA_LISTEN_FD")
    if number is None:
        return None
    listening, found = socket.socket(fileno=int(number)), set()
    listening.settimeout(SECONDS)
    while len(found) < count:
        sock, _ = listening.accept()
        sock.settimeout(SECONDS)
        with sock, contextlib.suppress(OSError):  # one that was killed since it came
            sock.sendall(f"{name}\n".encode())
            found.add(read(sock))
            found.discard("")
    return sorted(found)


def wait_until_refused(address, name):
    deadline = time.monotonic() + SECONDS
    with contextlib.suppress(ConnectionRefusedError):
        while time.monotonic() < deadline:
            with contextlib.suppress(ConnectionResetError):
                dialed(address, name)
            time.sleep(0.02)
        raise AssertionError("it is still open")


def main(values):
    name, folder = values["cluster"], pathlib.Path(values["folder"])
    killed = folder / "killed"
    if "killed" in values and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    peers = [each for each in values["peer"].split(",") if each]
    met = {
        "dialed": [dialed(each, name) for each in peers],
        "awaited": awaited(int(values["waits"]), name),
        "listen": values["listen"],
        "peers": peers,
    }
    (folder / name).write_text(json.dumps(met))
    if "refused" in values:
        wait_until_refused(peers[-1], name)


if __name__ == "__main__":
    main(dict(each.removeprefix("--").split("=", 1) for each in sys.argv[1:]))
