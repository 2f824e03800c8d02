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
    home, at = pathlib.Path(os.environ["FLWR_HOME"]), f"{task.root}:{PORT}"
    home.mkdir(parents=True, exist_ok=True)
    known = f'address = "{at}"\ninsecure = true\n'
    home.joinpath("config.toml").write_text(
        f'[superlink]\ndefault = "w"\n[superlink.w]\n{known}'
    )
    # There is nothing to install, and no network to install it from.
    options = ["--insecure", "--disable-runtime-dependency-installation"]
    where = [f"--host={task.root}", f"--port={PORT}"]
    with contextlib.ExitStack() as stack:
        superlink = subprocess.Popen([BIN / "flower-superlink", *options, *where])
        stack.callback(superlink.kill)
        while not _listens(task.root):
            if superlink.poll() is not None:
                raise RuntimeError("the SuperLink has ended")
            time.sleep(0.2)
        config = f'folder="{task.folder}"'
        run = [BIN / "flwr", "run", APP, "w", "--stream", "--run-config", config]
        subprocess.run(run, check=True)


def _listens(host: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, PORT), 1.0):
        return True
    return False


def main() -> None:
    """Serves, or is a SuperNode."""
    task = task_lib.of_command()
    # A folder each: all of them unpack the app into their own.
    home = f"{task.folder}/flower{task.worker}"
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": home}
    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    if task.worker == task_lib.SERVER:
        serve(task)
        return
    options = ["--insecure", f"--superlink={task.root}:{PORT}"]
    where = [f"--node-config=worker={task.worker}"]
    os.execv(BIN / "flower-supernode", ["flower-supernode", *options, *where])


if __name__ == "__main__":
    main()
