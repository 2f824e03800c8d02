"""How a cluster's training goes: averages between log lines, totals for its summary."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import shared_flags
from nebula_jax.communication import bridge
from nebula_jax.training import metrics


class Traffic(NamedTuple):
    """What a cluster's links have done since the process started."""

    sent: int = 0
    received: int = 0
    waited: float = 0.0  # seconds


def traffic(links: Sequence[bridge.Link]) -> Traffic:
    """The traffic of several links together."""
    return Traffic(
        sum(link.bytes_moved("sent") for link in links),
        sum(link.bytes_moved("received") for link in links),
        sum(link.waited for link in links),
    )


class Progress:
    """Records the steps of one cluster in its folder and on standard output."""

    def __init__(
        self,
        cluster: str,
        start: int,
        traffic: Callable[[], Traffic] = Traffic,
    ):
        """Begins after step `start`, from now on."""
        self._cluster = cluster
        self._log = metrics.MetricsLog(shared_flags.cluster_folder(cluster), start)
        self._traffic = traffic
        self._pending: list[Mapping[str, jax.Array]] = []
        self._begin = self._since = time.monotonic()
        self._before = self._at_begin = traffic()
        self._start = start
        self._tokens = 0

    def step(self, step: int, values: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step; every --log_every steps, tells their means."""
        self._pending.append(values)
        if step % shared_flags.LOG_EVERY.value == 0 or step == shared_flags.STEPS.value:
            self._tell(step)

    def _tell(self, step: int) -> None:
        pending = jax.device_get(self._pending)
        self._pending = []
        tokens = int(sum(each["tokens"] for each in pending))
        self._tokens += tokens
        now, traffic = time.monotonic(), self._traffic()
        seconds = now - self._since
        record = {
            name: float(np.mean([each[name] for each in pending]))
            for name in pending[0]
            if name != "tokens"
        } | {
            "tokens_per_second": tokens / seconds,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.received,
            "waiting_share": (traffic.waited - self._before.waited) / seconds,
        }
        self._since, self._before = now, traffic
        self._log.write(step, record)
        line = {"step": step} | record
        print(
            metrics.progress_line(self._cluster, shared_flags.STEPS.value, line),
            flush=True,
        )

    def evaluation(self, step: int, by_language: Mapping[str, Mapping]) -> None:
        """Takes figures on held-back text, language -> figure -> number."""
        figures = next(iter(by_language.values()))
        self._log.write(
            step,
            {
                f"held_back_{figure}": {
                    language: values[figure] for language, values in by_language.items()
                }
                for figure in figures
            },
        )

    def finish(self, last: int, more: Mapping[str, Any]) -> None:
        """Closes the files; writes summary.json unless nothing was left to do."""
        if self._pending:
            self._tell(last)
        self._log.close()
        if last == self._start:
            return
        seconds = time.monotonic() - self._begin
        traffic = self._traffic()
        summary = {
            "cluster": self._cluster,
            "first_step": self._start + 1,
            "last_step": last,
            "seconds": seconds,
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / seconds,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.received,
            "waited_seconds": traffic.waited - self._at_begin.waited,
            **more,
        }
        path = shared_flags.cluster_folder(self._cluster) / "summary.json"
        path.write_text(json.dumps(summary, indent=1) + "\n")
