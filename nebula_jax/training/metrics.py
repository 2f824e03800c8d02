"""Metrics of a cluster: metrics.jsonl, TensorBoard, a line for the screen."""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from nebula_jax import errors, files, strict_json

FILE = "metrics.jsonl"
ASIDE = "metrics.aside.jsonl"
"""Lines that a run which went on took out of FILE: damaged, or of later steps."""


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

        Args:
          step: after which the run goes on; 0 to begin.
          log: takes a message for a person if there are damaged records.

        Raises:
          errors.NebulaError: if the disk refuses, here and in `write`.
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
        """Adds the values of a step: numbers, or dicts of numbers by language."""
        record = {"step": step, "time": time.time(), **values}
        with self._writing():
            with self._path.open("a") as stream:
                stream.write(strict_json.dumps(record) + "\n")
            for name, value in values.items():
                parts = value.items() if isinstance(value, Mapping) else [("", value)]
                for language, number in parts:
                    tag = f"{name}/{language}" if language else name
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


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the records of a cluster's metrics.jsonl; damaged ones are left out.

    Numbers that were not finite are NaN.
    """
    found = _lines(folder / FILE)
    return [_with_nan(record) for _, record in found if record is not None]


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
    parts = [f"{cluster:<13} step {record['step']:>6}{f'/{steps}' if steps else ''}"]
    if "loss" in record:  # a part of a cut model may have none
        parts.append(f"loss {record['loss']:8.4f}")
    if record["tokens_per_second"]:
        parts.append(f"{record['tokens_per_second']:>7,.0f} tokens/s")
    else:
        parts.append(f"{record['steps_per_second']:>6.2f} steps/s")
    parts.append(f"sent {in_bytes(record['bytes_sent']):>8}")
    parts.append(f"waited {record['waiting_share']:4.0%}")
    if steps > record["step"]:
        left = (steps - record["step"]) / record["steps_per_second"]
        parts.append(f"left {in_time(left)}")
    return "  ".join(parts)


def in_time(seconds: float) -> str:
    """Formats a time to go: `42 s`, `12 min`, `3.5 h`.

    >>> in_time(42.4), in_time(720), in_time(12_600)
    ('42 s', '12 min', '3.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def in_bytes(count: float) -> str:
    """Formats a number of bytes: 12_345_678 -> `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
