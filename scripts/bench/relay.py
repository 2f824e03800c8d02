"""A relay between two clusters on this machine: a line that can be cut."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

PIECE = 1 << 16  # bytes
POLL_SECONDS = 0.02


class Relay:
    """A port whose connections lead to another one, while the line is up."""

    def __init__(
        self, target: tuple[str, int], bytes_per_second: float = float("inf")
    ) -> None:
        """Starts to relay to host and port, each way so fast; `close` ends it."""
        self._rate = bytes_per_second
        self._target, self._is_up, self._is_closed = target, True, False
        self._is_refusing = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @contextlib.contextmanager
    def cut(self, is_silent: bool) -> Iterator[None]:
        """Lets nothing pass in the block.

        If `is_silent`, what is sent comes after it; else connections end, new ones too.
        """
        self._is_refusing, self._is_up = not is_silent, False
        time.sleep(3 * POLL_SECONDS)  # what is under way has passed
        try:
            yield
        finally:
            self._is_up = True

    def close(self) -> None:
        """Ends all connections."""
        self._is_closed = True
        for each in self._threads:
            each.join()
        self._listening.close()

    def _accept(self) -> None:
        while not self._is_closed:
            if not self._is_up and not self._is_refusing:
                time.sleep(POLL_SECONDS)
            elif _is_ready(self._listening):
                here, _ = self._listening.accept()
                if not self._is_up:
                    here.close()
                    continue
                there = socket.create_connection(self._target)
                pair = threading.Thread(target=self._pump, args=(here, there))
                self._threads.append(pair)
                pair.start()

    def _pump(self, here: socket.socket, there: socket.socket) -> None:
        with here, there:
            back = threading.Thread(target=self._forward, args=(there, here))
            back.start()
            self._forward(here, there)
            back.join()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        """Relays one direction until either ends; ends the other one too."""
        with contextlib.suppress(OSError):
            while not self._is_closed:
                if not self._is_up:
                    if self._is_refusing:
                        break
                    time.sleep(POLL_SECONDS)
                elif _is_ready(source):
                    data = source.recv(PIECE)
                    if not data:
                        break
                    sink.sendall(data)
                    time.sleep(len(data) / self._rate)
        for each in (source, sink):
            with contextlib.suppress(OSError):  # the other direction ended first
                each.shutdown(socket.SHUT_RDWR)


def _is_ready(sock: socket.socket) -> bool:
    """Waits for a moment; returns True if there is something to read."""
    poll = select.poll()  # not select, which knows no descriptor above 1,023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * POLL_SECONDS))
