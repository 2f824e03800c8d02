"""Rows that clusters train after one of them has died for good, by quorum and without.

Three clusters train BERT with local steps over a hub. Each is started by a command of
its own, as on real clusters, and nobody starts the one that is killed again. Goodput is
the rows that all clusters train in the time after the kill, beside those of three
clusters at the rate before it.
"""

import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from nebula_jax import errors
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from scripts.bench import harness

BERT = "experiments.pretrain_bert"
CLUSTERS = 3
BATCH_SIZE = 4
CALM_SECONDS = 15.0  # from the first round on, before the kill
AFTER_SECONDS = 60.0
RECONNECT_TIMEOUT = 20.0
LONGEST_SECONDS = 600.0  # until all clusters have taken a step
MODEL = {
    "data_dir": "package:django",
    "languages": "en de",
    "vocab_size": 1000,
    "model_size": "nano",
    "max_length": 16,
    "batch_size": BATCH_SIZE,
    "clusters": CLUSTERS,
    "hub": 0,
    "inner_steps": 20,
    "fragments": 2,
    "delay": 2,
    "warmup_steps": 2,
    "eval_batches": 1,
    "eval_batch_size": 4,
    "eval_every": 1_000_000,
    "steps": 1_000_000,
    "checkpoint_every": 20,
    "log_every": 1,
    # A step takes so long on any machine: three processes share few cores here.
    "emulate_compute": 50,
    "tls": "off",
    "connect_timeout": 30,
    "peer_timeout": 5,
    "reconnect_timeout": RECONNECT_TIMEOUT,
}
QUORUM = {"quorum": CLUSTERS - 1, "grace": 0.2}


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Returns the flags of a process of pretrain_bert."""
    return [f"--{name}={value}" for name, value in settings.items()]


def measure(workdir: pathlib.Path) -> dict[str, Any]:
    """Kills a cluster for good in a run with a quorum, and in one without.

    Args:
      workdir: folder of the runs, which are kept.

    Returns:
      `runs`, of which `quorum` and `all` each have: `rate`, steps a second of a cluster
      before the kill; `goodput`; `is_running`, True if the others still train at the
      end; `last_line` of the hub. Beside them the settings of the measurement.

    Raises:
      errors.NebulaError: if a run does not begin.
    """
    common = MODEL | {"prepared_dir": workdir / "prepared"}
    prepare = common | {"cluster": "whole", "steps": 1, "workdir": workdir / "text"}
    command = [sys.executable, "-m", BERT, *arguments(prepare)]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise errors.NebulaError(f"preparing the text: {done.stdout}{done.stderr}")
    lines = (workdir / "text" / "run.flags").read_text().splitlines()
    given = dict(line.partition("=")[::2] for line in lines)
    common["vocabulary"] = given["--vocabulary"]
    runs = {
        "quorum": after_a_death(common | {"workdir": workdir / "quorum"} | QUORUM),
        "all": after_a_death(common | {"workdir": workdir / "all"}),
    }
    settings = QUORUM | {"clusters": CLUSTERS, "reconnect_timeout": RECONNECT_TIMEOUT}
    return {"runs": runs, "seconds_after": AFTER_SECONDS, "settings": settings}


def after_a_death(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Starts a run, kills its last cluster, and counts what the others train."""
    address = f"127.0.0.1:{harness.free_port()}"
    places = [{"listen": address}] + [{"peer": address}] * (CLUSTERS - 1)
    clusters = [
        harness.Command(
            BERT,
            arguments({**settings, "cluster": number, **place}),
            f"cluster:{number}",
        )
        for number, place in enumerate(places)
    ]
    try:
        deadline = time.time() + LONGEST_SECONDS
        while min(len(each.samples) for each in clusters) <= 2 * MODEL["inner_steps"]:
            ended = [each for each in clusters if not each.is_running()]
            if ended or time.time() > deadline:
                line = (ended or clusters)[0].last_line
                raise errors.NebulaError(f"the run did not begin: {line}")
            time.sleep(0.05)
        begin = time.time()
        time.sleep(CALM_SECONDS)
        killed = time.time()
        clusters[-1].kill()
        time.sleep(AFTER_SECONDS)
        end = time.time()
        moments = [sample.at for each in clusters for sample in each.samples]
        before = sum(begin <= each <= killed for each in moments)
        after = sum(killed <= each <= end for each in moments)
        rate = before / (killed - begin)
        result = {
            "rate": rate / CLUSTERS,
            "goodput": after / (rate * (end - killed)),
            "is_running": all(each.is_running() for each in clusters[:-1]),
            "last_line": clusters[0].last_line,
        }
    finally:
        for each in clusters:
            each.kill()
    process.message(f"goodput {result['goodput']:.1%}; hub: {result['last_line']}")
    return result


def markdown(found: Mapping[str, Any]) -> str:
    """Renders both runs."""
    settings = found["settings"]
    needs = {"quorum": f"{settings['quorum']}", "all": f"{settings['clusters']}"}
    rows = [
        [
            needs[name],
            f"{each['goodput']:.1%}",
            "trains on" if each["is_running"] else f"`{each['last_line']}`",
        ]
        for name, each in found["runs"].items()
    ]
    return report.join(
        f"One of {settings['clusters']} clusters with local steps over a hub dies for"
        f" good. Goodput: the rows that all train in {found['seconds_after']:g} s from"
        " then on, beside those at the rate before; a lost connection is waited for"
        f" for {settings['reconnect_timeout']:g} s.",
        report.table(
            ["clusters a round needs", "goodput", "the hub then"], rows, "rrl"
        ),
    )
