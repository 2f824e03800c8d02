"""Metrics of a cluster: metrics.jsonl, TensorBoard, a line for the screen."""

import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2


class MetricsLog:
    """The metrics files of one cluster.

    metrics.jsonl has one JSON object a line: `step`, `time` (seconds since the epoch),
    and numbers. Events are written in the calling thread: with a full disk, a
    background writer would block the training.
    """

    def __init__(self, folder: pathlib.Path, step: int) -> None:
        """Opens the files and removes the records after `step`, which come again."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        if step == 0:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        kept = [record for record in read(folder) if 0 < step >= record["step"]]
        self._path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._events = event_file_writer.EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._event(step + 1 if step else 0, session_log=start)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the values of a step: numbers, or dicts of numbers by language."""
        record = {"step": step, "time": time.time(), **values}
        with self._path.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        for name, value in values.items():
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            for language, number in parts:
                tag = f"{name}/{language}" if language else name
                self._event(step, summary=summary.scalar(tag, number))
        self._events.flush()

    def _event(self, step: int, **content: Any) -> None:
        event = event_pb2.Event(step=step, wall_time=time.time(), **content)
        self._events.write_event(event)

    def close(self) -> None:
        """Closes the files."""
        self._events.close()


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the records of a cluster's metrics.jsonl, up to an incomplete one."""
    path = folder / "metrics.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def progress_line(cluster: str, steps: int, record: Mapping[str, Any]) -> str:
    """Formats a record as one line for the screen."""
    return (
        f"{cluster:<13} step {record['step']:>6}/{steps}"
        f"  loss {record['loss']:8.4f}"
        f"  {record['tokens_per_second']:>7,.0f} tokens/s"
        f"  sent {in_bytes(record['bytes_sent']):>8}"
        f"  waited {record['waiting_share']:4.0%}"
    )


def in_bytes(count: float) -> str:
    """Formats a number of bytes: 12_345_678 -> `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
