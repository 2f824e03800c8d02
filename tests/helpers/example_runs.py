"""Commands of the examples, as a user starts them, and what they have saved."""

import os
import subprocess
import sys

import jax
import numpy as np
import tiny_runs

from nebula_jax.training import checkpoint


def start(folder, module, **flags):
    """Starts the real command in an empty folder; its errors are in its output."""
    return popen(folder, ["-m", f"experiments.{module}"], flags)


def start_script(folder, script, **flags):
    """Starts a script of a user's."""
    (folder / "script.py").write_text(script)
    return popen(folder, ["script.py"], flags)


def popen(folder, what, flags):
    command = [sys.executable, *what]
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


def params(workdir, cluster, step, like):
    """The parameters that a cluster has saved, in the tree of `like`."""
    saved = checkpoint.read(workdir / cluster / "checkpoints", step)
    names = sorted(name for name in saved if " 0.params." in name)
    return jax.tree.unflatten(jax.tree.structure(like), [saved[n] for n in names])


def assert_near(found, expected, atol):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, two in pairs:
        np.testing.assert_allclose(one, two, atol=atol)
