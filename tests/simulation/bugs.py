"""Bugs to plant in production code: each of them has to be found.

A bug is a list of (object, attribute, function of what was there -> what is there now).
"""

from collections.abc import Callable
from typing import Any

from nebula_jax import disk
from nebula_jax.communication import pending_connections
from nebula_jax.communication.wire import (
    connection,
    frames,
    liveness,
    receive_queue,
    reconnect,
    session,
    stuck_peers,
    windows,
)
from nebula_jax.parallel import pace
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import checkpoint_files

Patch = tuple[Any, str, Callable[[Any], Any]]


def _any_frame(admit: Callable) -> Callable:
    """Takes frames whatever their number."""

    def admits(self: Any, head: frames.Head) -> None:
        if head.kind not in frames.UNNUMBERED:
            head = head._replace(sequence=self._received.count)
        admit(self, head)

    return admits


def _one_less(acknowledge: Callable) -> Callable:
    """Reports one frame less than has come, whenever a connection opens."""

    def acknowledges(self: Any) -> int:
        is_opening, count = not self.unacknowledged, acknowledge(self)
        return max(0, count - 1) if is_opening and count % 2 else count

    return acknowledges


def _counted_at_its_head(admit: Callable) -> Callable:
    """Counts a frame as received when its head has come."""

    def admits(self: Any, head: frames.Head) -> None:
        admit(self, head)
        if head.kind not in frames.UNNUMBERED:
            self._received.add(0)

    return admits


def _not_counted(accept: Callable) -> Callable:
    """Does not count a whole frame."""

    def accepts(self: Any, message: frames.Message, nbytes: int) -> None:
        window, self._received = self._received, windows.ReceiveWindow()
        try:
            accept(self, message, nbytes)
        finally:
            self._received = window

    return accepts


def _same_epoch(begin: Callable) -> Callable:
    """Numbers every connection as the first."""

    def begins(self: Any, now: float) -> None:
        self._epoch = 0
        begin(self, now)

    return begins


def _closed_is_end(lose: Callable) -> Callable:
    """Takes a closed connection for the end of the session."""

    def loses(self: Any, error: Exception) -> None:
        lose(self, error)
        self._receive(frames.End())
        self.has_received_end = True

    return loses


def _first_failure_is_final(failed: Callable) -> Callable:
    """Dials no more after an attempt has failed."""

    def fails(self: Any, reason: str) -> None:
        failed(self, reason)
        self._pause = 1e9

    return fails


def _not_flushed(write_manifest: Callable) -> Callable:
    """Writes the manifest, and flushes neither it nor the arrays."""

    def writes(self: Any, partial: Any, step: int, about: Any) -> None:
        names = disk.files(partial)
        digests = {name: disk.digest(partial / name) for name in names}
        data = checkpoint_files.encode_manifest(step, about, digests)
        disk.write(partial / checkpoint_files.MANIFEST, data)

    return writes


def _newest_of_any(newest: Callable) -> Callable:
    """Goes on after the newest step that any cluster has."""
    return lambda steps, every, window=0: max(
        [0, *(max(s, default=0) for s in steps.values())]
    )


def _forgotten(self: Any, pending: Any) -> None:
    """Forgets a pending, and leaves its socket open."""
    self.pending.remove(pending)
    self._selector.unregister(pending.fd)


def _never(_: Any) -> Callable:
    return lambda *_: False


def _always(_: Any) -> property:
    return property(lambda _: True)


BUGS: dict[str, list[Patch]] = {
    "frames that were sent again are taken twice": [
        (session.Session, "_admit", _any_frame),
        (windows.ReceiveWindow, "acknowledge", _one_less),
    ],
    "a frame is sent again that the peer has": [
        (windows.ReceiveWindow, "acknowledge", _one_less)
    ],
    "a frame is acknowledged before it was handed over": [
        (session.Session, "_admit", _counted_at_its_head),
        (session.Session, "_accept", _not_counted),
    ],
    "an epoch is used twice": [(session.Session, "begin", _same_epoch)],
    "nothing is sent again on a new connection": [
        (windows.SendWindow, "rewind", lambda _: lambda self: None)
    ],
    "a closed connection is an end": [(connection.Connection, "lose", _closed_is_end)],
    "no attempt follows one that failed": [
        (reconnect.Reconnect, "failed", _first_failure_is_final)
    ],
    "silence never ends a connection": [(liveness.Liveness, "timed_out", _never)],
    "nothing is sent while there is nothing to send": [
        (liveness.Liveness, "needs_ping", _never)
    ],
    "a checksum is not compared": [
        (frames, "verify_payload", lambda _: lambda head, payload, tags: None)
    ],
    "a checkpoint is not flushed before it counts": [
        (checkpoint_files.Folder, "_write_manifest", _not_flushed)
    ],
    "a damaged checkpoint counts": [
        (checkpoint_files, "_damage", lambda _: lambda *args: "")
    ],
    "one checkpoint is kept": [
        (checkpoints, "to_keep", lambda _: lambda window, every: 1)
    ],
    "clusters go on from the newest step of any": [
        (checkpoints, "newest_of_all", _newest_of_any)
    ],
    "a peer that is stuck is waited for": [(stuck_peers.Watch, "is_stuck", _never)],
    "who is dropped stays open": [
        (pending_connections.Acceptor, "_forget", lambda _: _forgotten)
    ],
    "the window is one step wider": [
        (
            pace,
            "token_needed",
            lambda needed: lambda step, window: needed(step, window + 1),
        )
    ],
    "the last step is one too early": [
        (
            pace,
            "last_step_after_stop",
            lambda last: lambda done, window, total: last(done - 1, window, total),
        )
    ],
    "what waits to be taken has no bound": [
        (receive_queue.ReceiveQueue, "has_room", lambda _: lambda self: True)
    ],
    "what waits for an acknowledgement has no bound": [
        (windows.SendWindow, "can_send", _always)
    ],
}
