"""A process of `launcher` that trains nothing: it waits to be told how to end.

`python -m tiny_cluster --cluster=NAME --tls=CREDENTIALS --folder=FOLDER` leaves
FOLDER/NAME, and ends with the status that stands in FOLDER/NAME.end. Without
`--cluster` it is the launcher of `listens` and `dials:0`.
"""

import os
import pathlib
import sys
import time

from nebula_jax.runtime.life import process
from nebula_jax.security import tls

CLUSTERS = ("listens", "dials:0")


def cluster(values: dict[str, str]) -> int:
    name, folder = values["cluster"], pathlib.Path(values["folder"])
    interrupt = process.Interrupt().install()
    interrupt.is_graceful = True
    if values["tls"] != "off":
        make = tls.client_contexts(pathlib.Path(values["tls"]), name)
        make()  # as when a connection comes back
    partial = folder / f".{name}"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / name)
    end = folder / f"{name}.end"
    while not interrupt.requested():
        if end.exists():
            return int(end.read_text())
        time.sleep(0.02)
    return interrupt.exit_status(name, 0, 1)


def launch(values: dict[str, str]) -> int:
    from nebula_jax.runtime import connect
    from nebula_jax.runtime.life import launcher

    def arguments(name, reach):
        return [
            f"--cluster={name}", f"--tls={reach.tls}", f"--folder={values['folder']}"
        ]  # fmt: skip

    settings, workdir = connect.Settings(tls=values["tls"]), values["folder"]
    prepared = launcher.prepared(
        pathlib.Path(workdir), CLUSTERS, settings, int(values["restart"])
    )
    with prepared as start:
        return start(["-m", "tiny_cluster"], arguments)


if __name__ == "__main__":
    flags = dict(each.removeprefix("--").split("=", 1) for each in sys.argv[1:])
    main = cluster if "cluster" in flags else launch
    sys.exit(process.guarded(lambda: main(flags)))
