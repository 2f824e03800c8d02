"""Commands of the examples, as a user starts them, and what they have saved."""

import concurrent.futures
import os
import subprocess
import sys

import jax
import ports
import tiny_runs

import nebula_jax as nebula
from nebula_jax.training import checkpoint


def start(folder, module, **flags):
    """Starts the real command in an empty folder; its errors are in its output."""
    command = [sys.executable, "-m", f"experiments.{module}"]
    return subprocess.Popen(
        command + [f"--{name}={value}" for name, value in flags.items()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": tiny_runs.QUICK_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(run):
    output = run.communicate(timeout=240)[0]
    assert run.returncode == 0, output
    return output


def train_here(roles, workdir, **settings):
    """Trains all clusters to the end, each in a thread: sooner than processes."""
    reached = {name: f"127.0.0.1:{ports.free_port()}" for name in roles}

    def train(name):
        others = [f"{each}={at}" for each, at in reached.items() if each != name]
        way = {"listen": reached[name], "peer": ",".join(others), "tls": "off"}
        with nebula.Run(name, [*roles], workdir=workdir, **settings, **way) as run:
            roles[name](run)
            return run.exit_status()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert not any(pool.map(train, roles))


def params(workdir, cluster, step, like):
    """The parameters that a cluster has saved, in the tree of `like`."""
    saved = checkpoint.read(workdir / cluster / "checkpoints", step)
    names = sorted(name for name in saved if " 0.params." in name)
    return jax.tree.unflatten(jax.tree.structure(like), [saved[n] for n in names])
