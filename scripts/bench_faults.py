"""Measures what faults cost: the recovery from each kind, and goodput under kills.

    python -m scripts.bench_faults --out=bench_faults.json

A tiny M3 run with --restart trains, and each kind of its processes is killed, --rounds
times: the recovery lasts until every cluster has taken a step again. After a kill of
the launcher the same command is given again. Then a cluster is killed every 5 minutes,
for 30 minutes: goodput is the steps that remain of that time, beside those of the same
run's own rate between the faults. A line is cut between two ends of the bridge in this
process, silently or with an end of its connections: the recovery lasts from when the
line is back until a message has crossed. The seed draws victims and moments.
"""

import contextlib
import itertools
import pathlib
import random
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
from absl import flags

from experiments import shared_flags
from nebula_jax import errors
from nebula_jax.communication import bridge, endpoints, listener
from nebula_jax.communication.wire import frames
from nebula_jax.runtime.life import process, restarts
from nebula_jax.runtime.records import report, run_folder
from scripts.bench import harness
from scripts.bench import relay as relay_lib
from scripts.bench.harness import Sample

MINUTES = 30.0  # in which goodput is measured
KILL_EVERY = 300.0  # seconds, in that time
FLAGFILE = "experiments/flags/m3_quickstart.flags"
CLUSTERS = ("discriminator", "generator:0", "generator:1")
KINDS = ("generator", "discriminator", "launcher")
LONGEST_SECONDS = 600.0  # until a run takes its first step, or one again
CALM_SECONDS = (3.0, 8.0)  # undisturbed, before a kill that is measured by itself
CUT_SECONDS = (1.0, 15.0)
PEER_TIMEOUT = 2.0  # seconds, on the line that is cut
POLL_SECONDS = 0.05
KILL_TARGET, CUT_TARGET = 15.0, 5.0  # seconds of recovery, at most
GOODPUT_TARGET = 0.9  # at least


class Fault(NamedTuple):
    """A kill: when it was, and when every cluster had taken a step again."""

    killed: float
    recovered: float


class Run:
    """A tiny M3 run that goes on until it is stopped."""

    def __init__(self, workdir: pathlib.Path, seed: int) -> None:
        self._arguments = [
            f"--flagfile={FLAGFILE}",
            f"--workdir={workdir.absolute()}",
            "--steps=1000000",
            "--eval_every=1000000",
            "--checkpoint_every=20",
            "--log_every=5",
            "--restart=1000",
            f"--seed={seed}",
        ]
        self._folders = [run_folder.of_cluster(workdir, name) for name in CLUSTERS]
        self._launchers: list[harness.Command] = []
        self._start()

    def _start(self) -> None:
        module = "experiments.pretrain_m3"
        self._launchers.append(harness.Command(module, self._arguments))

    def samples(self, begin: float, end: float) -> list[Sample]:
        """Returns the discriminator's progress in a time."""
        every = itertools.chain(*(each.samples for each in self._launchers))
        return [each for each in every if begin <= each.at <= end]

    def steps_since(self, moment: float) -> float:
        """Waits until every cluster has taken a step since `moment`; returns when.

        Raises errors.NebulaError if the run ended, or none was taken for long.
        """
        launcher = self._launchers[-1]
        while time.time() < moment + LONGEST_SECONDS:
            seconds = restarts.seconds_until_step(self._folders, moment)
            if seconds is not None:
                return moment + seconds
            if not launcher.is_running():
                raise errors.NebulaError(f"the run ended: {launcher.last_line}")
            time.sleep(POLL_SECONDS)
        raise errors.NebulaError(
            f"no step within {LONGEST_SECONDS:g} s: {launcher.last_line}"
        )

    def kill(self, victim: str) -> Fault:
        """Kills a cluster or the `launcher`; returns when all train again."""
        process = self._launchers[-1].process
        family = {
            argument.partition("=")[2]: child
            for child in psutil.Process(process.pid).children()
            for argument in child.cmdline()
            if argument.startswith("--cluster=")
        }
        moment = time.time()
        if victim == "launcher":
            process.kill()
            process.wait()
            psutil.wait_procs(family.values(), timeout=LONGEST_SECONDS)
            self._start()
        else:
            family[victim].kill()
        return Fault(moment, self.steps_since(moment))

    def stop(self) -> None:
        """Ends it; it saves."""
        process = self._launchers[-1].process
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        self._launchers[-1].kill()  # the clusters notice


def victim_of(kind: str, draw: random.Random) -> str:
    """Returns a process of a kind: `generator` -> generator:0 or generator:1."""
    names = [name for name in CLUSTERS if name.startswith(kind)]
    return draw.choice(names) if names else kind


def kills(run: Run, rounds: int, draw: random.Random) -> dict[str, list[float]]:
    """Measures the recovery from kills; returns kind -> seconds of each round."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, kind in itertools.product(range(rounds), KINDS):
        time.sleep(draw.uniform(*CALM_SECONDS))
        fault = run.kill(victim_of(kind, draw))
        found[kind].append(fault.recovered - fault.killed)
        process.message(f"{kind} killed: {found[kind][-1]:.1f} s")
    return found


def disturbed(run: Run, draw: random.Random) -> dict[str, Any]:
    """Kills a cluster now and then; returns `goodput` of that time."""
    begin, faults = time.time(), []
    end = begin + 60 * MINUTES
    while (next_kill := begin + KILL_EVERY * (len(faults) + 1)) < end:
        time.sleep(max(0.0, next_kill - time.time()))
        faults.append(run.kill(draw.choice(CLUSTERS)))
        seconds = faults[-1].recovered - faults[-1].killed
        process.message(f"kill {len(faults)}: {seconds:.1f} s")
    time.sleep(max(0.0, end - time.time()))
    found = goodput(run.samples(begin, end), faults)
    return found | {"minutes": MINUTES, "kill_every": KILL_EVERY}


def goodput(samples: Sequence[Sample], faults: Sequence[Fault]) -> dict[str, Any]:
    """Compares the steps of a time with those that it had had without faults.

    Returns the steps that remained, the rate (steps a second between faults), goodput
    and kills; raises errors.NebulaError if there are too few samples.
    """
    edges = [float("-inf"), *itertools.chain(*faults), float("inf")]
    steps = seconds = 0.0
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        inside = [each for each in samples if begin <= each.at <= end]
        if len(inside) > 1:
            steps += inside[-1].step - inside[0].step
            seconds += inside[-1].at - inside[0].at
    if not steps:
        raise errors.NebulaError("too short a time: no progress between faults")
    rate, remained = steps / seconds, samples[-1].step - samples[0].step
    whole = samples[-1].at - samples[0].at
    return {
        "steps": remained,
        "rate": rate,
        "goodput": remained / (rate * whole),
        "kills": len(faults),
    }


def cuts(rounds: int, draw: random.Random) -> list[float]:
    """Measures the recovery of the bridge from cuts of the line; seconds of each."""
    hello = [frames.Hello(name, "1", {}) for name in ("target", "source")]
    timeouts = {"peer_timeout": PEER_TIMEOUT, "reconnect_timeout": 60.0, "tls": None}
    quiet: dict[str, Callable[[str], None]] = {"log": lambda line: None}
    found = []
    socket_ = endpoints.listen(("127.0.0.1", 0))
    with (
        listener.Listener(socket_, hello[0], **timeouts, **quiet) as listening,
        contextlib.closing(relay_lib.Relay(listening.address)) as line,
    ):
        there = bridge.connect(
            line.address, hello[1], peer="target", connect_timeout=20.0,
            **timeouts, **quiet,
        )  # fmt: skip
        here = listening.accept(20.0)
        here.welcome(0)
        there.wait_for_welcome(20.0)
        for step in range(1, rounds + 1):
            with line.cut(is_silent=draw.random() < 0.5):
                here.step_done(step)
                time.sleep(draw.uniform(*CUT_SECONDS))
            back = time.monotonic()
            there.wait_for_step(step)
            found.append(time.monotonic() - back)
            process.message(f"line cut: {found[-1]:.2f} s after it was back")
        closing = threading.Thread(target=here.close)
        closing.start()
        there.close()
        closing.join()
    return found


def targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compares the worst recoveries, and goodput, with what is wanted of them."""
    found = [
        report.at_most(f"recovery from a kill of the {kind}, s", max(each), KILL_TARGET)
        for kind, each in result["kills"].items()
    ]
    what = "recovery after a line is back, s"
    found.append(report.at_most(what, max(result["cuts"]), CUT_TARGET))
    what = f"goodput with a kill every {result['goodput']['kill_every']:g} s"
    value = result["goodput"]["goodput"]
    return [*found, report.at_least(what, value, GOODPUT_TARGET)]


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    measured = {f"kill of the {kind}": each for kind, each in result["kills"].items()}
    measured["cut of the line, after it is back"] = result["cuts"]
    rows = [
        [what, str(len(each)), f"{statistics.median(each):.1f} s", f"{max(each):.1f} s"]
        for what, each in measured.items()
    ]
    found = result["goodput"]
    return report.join(
        report.heading(result, f"seed {result['seed']}"),
        report.table(["recovery", "times", "median", "longest"], rows),
        f"In {found['minutes']:g} minutes {found['kills']} clusters were killed, and"
        f" {found['steps']:,} steps remained: {found['goodput']:.1%} of those at the"
        f" run's own rate between faults, {found['rate']:.2f} a second.",
        report.targets(result["targets"]),
    )


def recoveries(workdir: pathlib.Path, rounds: int, seed: int) -> dict[str, Any]:
    """Measures the recovery from each kind of fault, and goodput under kills."""
    draw = random.Random(seed)
    result: dict[str, Any] = {"cuts": cuts(rounds, draw)}
    run = Run(workdir, seed)
    try:
        run.steps_since(time.time())
        result["kills"] = kills(run, rounds, draw)
        result["goodput"] = disturbed(run, draw)
    finally:
        run.stop()
    return result | {"targets": targets(result)}


@process.sigterm_as_exit()
def main() -> int:
    """Measures, prints the record, and writes --out."""
    given = flags.FLAGS.flag_values_dict()
    workdir = pathlib.Path(given["workdir"] or "runs/bench_faults")
    if workdir.exists():
        raise errors.SettingsError(f"--workdir={workdir} is there already")
    begin = time.monotonic()
    result = recoveries(workdir, given["rounds"], given["seed"])
    harness.finish({"seed": given["seed"]} | result, begin, markdown)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["out", "rounds", "seed", "workdir"])
