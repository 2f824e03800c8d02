"""Starts Flower's own processes: SuperLink and the run at the server, SuperNodes."""

import os
import pathlib
import subprocess
import sys

from scripts.peers import task as task_lib

PORT = 8000
APP = pathlib.Path(__file__).with_name("flower_app")


def command(name: str) -> str:
    """Returns the path of a command of this environment."""
    return str(pathlib.Path(sys.executable).with_name(name))


def serve(task: task_lib.Task) -> None:
    """Starts a SuperLink, and a run when it answers."""
    home = pathlib.Path(os.environ["FLWR_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    at = f"{task.root}:{PORT}"
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "w"\n'
        f'[superlink.w]\naddress = "{at}"\ninsecure = true\n'
    )
    where = [f"--host={task.root}", f"--port={PORT}"]
    link = [command("flower-superlink"), "--insecure", *where]
    with subprocess.Popen(link) as superlink:
        config = f'folder="{task.folder}"'
        run = [command("flwr"), "run", str(APP), "w", "--stream"]
        while subprocess.run([*run, "--run-config", config]).returncode:
            pass  # until the SuperLink listens
        superlink.wait()


def main() -> None:
    """Serves, or is a SuperNode."""
    task = task_lib.of_command()
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": f"{task.folder}/flower"}
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    if task.worker == 2:
        serve(task)
    node = [command("flower-supernode"), "--insecure"]
    where = [f"--superlink={task.root}:{PORT}", f"--node-config=worker={task.worker}"]
    os.execv(node[0], [*node, *where])


if __name__ == "__main__":
    main()
