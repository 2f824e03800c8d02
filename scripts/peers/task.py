"""The task that every framework is given: model, batches and held-out text, in NumPy.

The model guesses a byte from the 16 before it: an embedding and two hidden layers. All
begin with the same parameters and take the same batches in the same order.
"""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

SYMBOLS, CONTEXT, EMBEDDING = 128, 16, 64
HELD_OUT = 4096  # examples
SERVER = 2  # the number of the process that a framework's server is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its schedule."""

    width: int  # of both hidden layers
    rounds: int
    inner_steps: int
    batch: int  # examples of one worker in a step
    rate: float = 1e-3
    saves: bool = False  # True if a worker is to be killed: then checkpoints are saved


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Size):
    """A worker's part of the work."""

    worker: int = 0  # 0 or 1; SERVER for the server of a framework that has one
    folder: str  # with text.npy; takes the worker's log and what the framework writes
    host: str = ""
    root: str = ""  # the address of worker 0, where a framework's server runs too
    device: str = ""  # the network interface of `host`
    module: str = ""  # of `scripts.peers`, with the framework's part
    variant: str = ""

    @property
    def steps(self) -> int:
        """The number of steps of a worker."""
        return self.rounds * self.inner_steps

    def parameters(self) -> dict[str, np.ndarray]:
        """Returns those of step 0: weights [in, out] and biases, float32."""
        layers = {
            "first": (CONTEXT * EMBEDDING, self.width),
            "second": (self.width, self.width),
            "head": (self.width, SYMBOLS),
        }
        return drawn(0, {"embedding": (SYMBOLS, EMBEDDING)}, layers)

    def write(self) -> pathlib.Path:
        """Leaves it in its folder, for `read`; returns the file."""
        path = pathlib.Path(self.folder, f"task{self.worker}.json")
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    def rows(self, step: int) -> np.ndarray:
        """Returns this worker's batch of a step, from 1: int32 [B, CONTEXT + 1]."""
        draw = np.random.default_rng([step, self.worker])
        return self._examples(
            draw.integers(HELD_OUT * 32, len(self._text()), self.batch)
        )

    def held_out(self) -> np.ndarray:
        """Returns text that nobody trains on: int32 [HELD_OUT, CONTEXT + 1]."""
        return self._examples(np.arange(HELD_OUT) * 31 + CONTEXT)

    def _text(self) -> np.ndarray:
        return np.load(pathlib.Path(self.folder, "text.npy"), mmap_mode="r")

    def _examples(self, ends: np.ndarray) -> np.ndarray:
        return self._text()[ends[:, None] + np.arange(-CONTEXT, 1)].astype(np.int32)


def drawn(
    seed: int, tables: Mapping[str, tuple[int, int]], layers: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Draws tables [rows, columns], and layers [in, out] with their biases, float32."""
    draw, found = np.random.default_rng(seed), {}
    for name, (rows, columns) in {**tables, **layers}.items():
        scale = 1.0 if name in tables else rows**-0.5
        values = draw.standard_normal((rows, columns)) * scale
        found[name] = values.astype(np.float32)
        if name in layers:
            found[f"{name}_bias"] = np.zeros(columns, np.float32)
    return found


def logits(gelu: Callable[[Any], Any], params: Mapping[str, Any], rows: Any) -> Any:
    """Computes the model of local steps in any framework: [B, SYMBOLS].

    `rows` are [B, CONTEXT + 1] integers, the last of which is to be guessed.
    """
    x = params["embedding"][rows[:, :-1]].reshape(len(rows), -1)
    for name in ("first", "second"):
        x = gelu(x @ params[name] + params[f"{name}_bias"][None])
    return x @ params["head"] + params["head_bias"][None]


class Log:
    """A worker's reports, a line of JSON each: when rounds ended, and the end."""

    def __init__(self, task: Task) -> None:
        """Appends to the worker's file: it may have been killed before."""
        self._path = pathlib.Path(task.folder, f"worker{task.worker}.jsonl")
        self._device, self._computed = task.device, 0.0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Counts the block's seconds as computing."""
        begin = time.perf_counter()
        yield
        self._computed += time.perf_counter() - begin

    def round(self, number: int) -> None:
        """Reports that a round has ended: the parameters of the next one are there."""
        crossed = _crossed(self._device)
        self._write(round=number, computed=self._computed, bytes=crossed)
        self._computed = 0.0

    def end(self, loss: float | None) -> None:
        """Reports the loss, in nats; None of a worker that is done and has none."""
        self._write(loss=loss)

    def _write(self, **found: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"at": time.time(), **found}) + "\n")


def _crossed(device: str) -> int:
    """Returns the bytes that came and left by a device so far, with all headers."""
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == device:
            return int(numbers.split()[0]) + int(numbers.split()[8])
    return 0


def read(path: pathlib.Path) -> Task:
    """Returns the task that `Task.write` left."""
    return Task(**json.loads(path.read_text()))
