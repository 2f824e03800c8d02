"""Metrics of a cluster: metrics.jsonl, TensorBoard, a line for the screen."""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from nebula_jax import errors, files, strict_json

FILE = "metrics.jsonl"
ASIDE = "metrics.aside.jsonl"  # FILE's lines that a resumed run found damaged or later
NEWEST_BYTES = 1 << 17  # at the end of FILE, where the newest record is looked for


class MetricsLog:
    """The metrics files of one cluster.

    metrics.jsonl has one JSON object a line: `step`, `time` (seconds since the epoch),
    and numbers, null where one is NaN or Inf. Events are written in the calling thread:
    with a full disk, a background writer would block the training.
    """

    def __init__(
        self, folder: pathlib.Path, step: int, log: Callable[[str], None]
    ) -> None:
        """Opens the files; sets aside the records after `step`, which come again.

        errors.NebulaError if the disk refuses, here and in `write`.
        """
        self._path = folder / FILE
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            self._set_aside(step, log)
            prefix, suffix = str(folder / "events"), f".{os.getpid()}"
            self._events = event_file_writer.EventsWriter(prefix, suffix)
            # TensorBoard then forgets what earlier files have from this step on.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._event(step + 1 if step else 0, session_log=start)

    def _set_aside(self, step: int, log: Callable[[str], None]) -> None:
        lines = _lines(self._path)
        kept: list[bytes] = []
        aside: list[bytes] = []
        for line, found in lines:
            is_kept = found is not None and 0 < step >= found["step"]
            (kept if is_kept else aside).append(line)
        if aside:
            with self._path.with_name(ASIDE).open("ab") as stream:
                stream.writelines(line + b"\n" for line in aside)
                stream.flush()
                os.fsync(stream.fileno())
        with files.writing(self._path) as partial:
            partial.write_bytes(b"".join(line + b"\n" for line in kept))
        damaged = sum(found is None for _, found in lines)
        if damaged:
            log(f"{self._path}: {damaged} damaged lines are set aside in {ASIDE}")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the values of a step; see `Tracker`."""
        record = {"step": step, "time": time.time(), **values}
        with self._writing():
            with self._path.open("a") as stream:
                stream.write(strict_json.dumps(record) + "\n")
            for tag, number in flat(values).items():
                self._event(step, summary=summary.scalar(tag, number))
            self._events.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise errors.NebulaError(f"cannot write {self._path}: {reason}") from None

    def _event(self, step: int, **content: Any) -> None:
        event = event_pb2.Event(step=step, wall_time=time.time(), **content)
        self._events.write_event(event)

    def close(self) -> None:
        """Closes the files."""
        self._events.close()


class Tracker(Protocol):
    """A place that takes a cluster's metrics as they come, such as `MetricsLog`."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes the values of a step: numbers, or dicts of numbers by name."""

    def close(self) -> None:
        """Ends: no more values come."""


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns numbers by name, those of a dict as `name/key`.

    >>> flat({"loss": 1.0, "held_out_auc": {"en": 0.5}})
    {'loss': 1.0, 'held_out_auc/en': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        found |= {f"{name}/{key}" if key else name: each for key, each in parts}
    return found


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the records of a cluster's metrics.jsonl; damaged ones are left out.

    Numbers that were not finite are NaN.
    """
    found = _lines(folder / FILE)
    return [_with_nan(record) for _, record in found if record is not None]


def newest(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the newest record of steps from the end of metrics.jsonl; {} if none."""
    path = folder / FILE
    if not path.is_file():
        return {}
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - NEWEST_BYTES))
        last = stream.read()
    for line in reversed(last.split(b"\n")):
        with contextlib.suppress(ValueError):  # the first may be a part of one
            record = json.loads(line)
            if isinstance(record, dict) and "steps_per_second" in record:
                return _with_nan(record)
    return {}


def _lines(path: pathlib.Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Returns every line with its record, None where it is damaged."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
        if line:
            found.append((line, record if is_record else None))
    return found


def _with_nan(record: dict[str, Any]) -> dict[str, Any]:
    for name, value in record.items():
        if isinstance(value, dict):
            record[name] = _with_nan(value)
        elif value is None:
            record[name] = math.nan
    return record


def progress_line(cluster: str, steps: int, record: Mapping[str, Any]) -> str:
    """Formats a record as one line for the screen; 0 `steps` if not known."""
    step = record["step"]
    parts = [f"{cluster:<13} step {step:>6}"]
    if steps:
        parts[0] += f"/{steps} {step / steps:4.0%}"
    if record.get("seconds_left"):
        parts.append(f"left {in_time(record['seconds_left'])}")
    parts += [f"{name} {record[name]:8.4f}" for name in losses(record)]
    parts.append(f"{speed(record):>16}")
    if record["bytes_sent"] or record["bytes_received"]:
        sent, received = record["sent_mbit"], record["received_mbit"]
        parts.append(f"sends {sent:.1f}, gets {received:.1f} Mbit/s")
    if trips := record.get("round_trip"):
        parts.append(f"round trip {1000 * max(trips.values()):.0f} ms")
    parts.append(f"waited {record['waiting_share']:4.0%}{waited_for(record)}")
    return "  ".join(parts)


def speed(record: Mapping[str, Any]) -> str:
    """Formats tokens a second, or steps where no tokens are counted."""
    if record.get("tokens_per_second"):
        return f"{record['tokens_per_second']:,.0f} tokens/s"
    return f"{record['steps_per_second']:.2f} steps/s"


def losses(record: Mapping[str, Any]) -> list[str]:
    """Returns the names of a record's losses, the sum of all first.

    >>> losses({"step": 1, "rtd_loss": 0.2, "loss": 9.0, "auc": 0.5})
    ['loss', 'rtd_loss']
    """
    # A part of a cut model may have none.
    return sorted(
        (name for name in record if name == "loss" or name.endswith("_loss")),
        key=lambda name: name != "loss",
    )


def waited_for(record: Mapping[str, Any]) -> str:
    """Returns ` for NAME`, the peer that was waited for the longest; empty if none."""
    shares = record.get("waiting_for") or {"": 0.0}
    name = max(shares, key=shares.__getitem__)
    return f" for {name}" if shares[name] >= 0.01 else ""


def in_time(seconds: float) -> str:
    """Formats a time to go: `42 s`, `12 min`, `3.5 h`.

    >>> in_time(42.4), in_time(720), in_time(12_600)
    ('42 s', '12 min', '3.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
