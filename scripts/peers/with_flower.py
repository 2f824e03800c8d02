"""Flower's own processes: a SuperLink and the run, or a worker's SuperNode."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

from scripts.peers import task as task_lib

PORT = 8000
APP = pathlib.Path(__file__).with_name("flower_app")
BIN = pathlib.Path(sys.executable).parent


def serve(task: task_lib.Task) -> None:
    """Runs a SuperLink for as long as the app runs: it would wait for the next one."""
    env, at = environment(task), f"{task.root}:{PORT}"
    home = pathlib.Path(env["FLWR_HOME"])
    home.mkdir(exist_ok=True)
    known = f'address = "{at}"\ninsecure = true\n'
    home.joinpath("config.toml").write_text(
        f'[superlink]\ndefault = "w"\n[superlink.w]\n{known}'
    )
    # There is nothing to install, and no network to install it from.
    options = ["--insecure", "--disable-runtime-dependency-installation"]
    where = [f"--host={task.root}", f"--port={PORT}"]
    with contextlib.ExitStack() as stack:
        superlink = subprocess.Popen(
            [BIN / "flower-superlink", *options, *where], env=env
        )
        stack.callback(superlink.kill)
        while not _listens(task.root):
            if superlink.poll() is not None:
                raise RuntimeError("the SuperLink has ended")
            time.sleep(0.2)
        config = f'folder="{task.folder}"'
        run = [BIN / "flwr", "run", APP, "w", "--stream", "--run-config", config]
        subprocess.run(run, env=env, check=True)


def _listens(host: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, PORT), 1.0):
        return True
    return False


def train(task: task_lib.Task) -> None:
    """Becomes a SuperNode, in whose own processes the app trains."""
    options = ["--insecure", f"--superlink={task.root}:{PORT}"]
    where = [f"--node-config=worker={task.worker}"]
    command = [str(BIN / "flower-supernode"), *options, *where]
    os.execve(command[0], command, environment(task))


def environment(task: task_lib.Task) -> dict[str, str]:
    """Returns the variables of Flower; its processes unpack the app each for itself."""
    home = {"FLWR_HOME": f"{task.folder}/flower{task.worker}"}
    path = {"PATH": f"{BIN}:{os.environ['PATH']}", "FLWR_TELEMETRY_ENABLED": "0"}
    return os.environ | path | home
