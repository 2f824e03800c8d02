"""A line that breaks when it is told to: a TCP relay between connector and listener."""

import contextlib
import random
import select
import socket
import struct
import threading
import time

UP, DOWN = "up", "down"


class Proxy:
    """Relays connections to `target`; every fault is a method."""

    def __init__(self, target):
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = self._listening.getsockname()
        self.connections = 0
        self._holes: set[str] = set()
        self._rate: float | None = None
        self._flips: dict[str, int] = {}
        self._random = random.Random(0)
        self._flip_at: tuple[str, int] | None = None
        self.flipped = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_closed = self._is_refusing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """Resets all connections, as a middlebox that lost its table."""
        for pair in self._pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    sock.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def go_down(self):
        """Resets all connections, and every new one, until `refuse(False)`."""
        self.refuse()
        self.cut()

    def refuse(self, refusing=True):
        """New connections are reset at once."""
        self._is_refusing = refusing

    def swallow(self, *directions):
        """Bytes of the present connections vanish from now on, without a word."""
        self._holes = set(directions)

    def limit(self, rate):
        """At most `rate` bytes a second each way."""
        self._rate = rate

    def flip(self, every, *directions):
        """A bit is flipped in about one of `every` bytes from now on."""
        self._flips = dict.fromkeys(directions, every)

    def flip_at(self, direction, offset):
        """A bit is flipped in this byte of the next connection, in no other one."""
        self._flip_at = direction, offset

    def close(self):
        self._is_closed = True
        self._listening.close()
        self.cut()

    def _accept(self):
        while not self._is_closed:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            if self._is_refusing:
                here.close()
                continue
            self._holes = set()  # a new connection finds its way
            there = self._connected()
            if there is None:  # the listener has ended, and who dialed finds out
                here.close()
                continue
            self._pairs.append((here, there))
            self.connections += 1
            for pair, name in (((here, there), UP), ((there, here), DOWN)):
                threading.Thread(target=self._relay, args=(*pair, name)).start()

    def _connected(self):
        """A connection to the target; waits for it if it has never answered yet."""
        while not self._is_closed:
            try:
                return socket.create_connection(self._target)
            except OSError:
                if self.connections:
                    break
                time.sleep(0.01)
        return None

    def _damaged(self, data, direction, start):
        if self._flip_at is not None and self._flip_at[0] == direction:
            offset = self._flip_at[1] - start
            if 0 <= offset < len(data):
                data = bytearray(data)
                data[offset] ^= 4
                self._flip_at = None
                self.flipped += 1
        every = self._flips.get(direction)
        if not every or self._random.random() >= len(data) / every:
            return data
        data = bytearray(data)
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        self.flipped += 1
        return data

    def _relay(self, source, sink, direction):
        connection, passed = self.connections, 0
        poller = select.poll()  # select itself knows no descriptor beyond 1023
        with contextlib.suppress(OSError, ValueError):
            poller.register(source, select.POLLIN)
            while True:
                size = 65536 if self._rate is None else max(1, int(self._rate / 20))
                if self._rate is not None:
                    time.sleep(0.05)
                if not poller.poll(50):
                    if source.fileno() < 0 or self._is_closed:
                        break
                    continue
                data = source.recv(size)
                if not data:
                    break
                if direction in self._holes and connection == self.connections:
                    continue
                sink.sendall(self._damaged(data, direction, passed))
                passed += len(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
