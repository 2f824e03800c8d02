"""torchft: DiLoCo, two replica groups of one process and a lighthouse."""

import datetime
import os
import pathlib
import socket
import sys
import time

import torch
import torchft
from torch import distributed
from torchft import local_sgd

from scripts.peers import task as task_lib
from scripts.peers import torch_model

LIGHTHOUSE, STORE = 29510, 29600
WAIT = datetime.timedelta(seconds=300)


def train(task: task_lib.Task) -> None:
    """Trains as one of two replica groups."""
    os.environ |= {"GLOO_SOCKET_IFNAME": task.device}
    # torchft names this host to its peer; no name server knows it here.
    socket.gethostname = lambda: task.host
    worker = torch_model.Worker(task)
    model, inner = worker.model, worker.inner
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = distributed.TCPStore(
        task.host, STORE, is_master=True, wait_for_workers=False
    )

    def state() -> dict[str, object]:
        both = {"inner": inner.state_dict(), "outer": outer.state_dict()}
        return {"model": model.state_dict(), **both}

    def load(found: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["inner"])
        outer.load_state_dict(found["outer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=WAIT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=WAIT,
        quorum_timeout=WAIT,
        rank=0,
        world_size=1,
        store_addr=task.host,
        store_port=STORE,
        lighthouse_addr=f"http://{task.root}:{LIGHTHOUSE}",
        replica_id=f"replica{task.worker}",
        hostname=task.host,
    )
    with local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=task.inner_steps):
        while (done := manager.current_step()) < task.rounds:
            for number in range(task.inner_steps):
                worker.step(done * task.inner_steps + number + 1)
            if manager.current_step() > done:
                worker.log.round(manager.current_step())
    worker.log.end(worker.loss())
    time.sleep(2)  # seconds in which the other one leaves its last quorum
    manager.shutdown(wait=False)
    del store


def serve(task: task_lib.Task) -> None:
    """Becomes the lighthouse, by which the groups find each other."""
    command = str(pathlib.Path(sys.executable).with_name("torchft_lighthouse"))
    options = ["--min_replicas=2", "--join_timeout_ms=1000"]
    os.execv(command, [command, *options, f"--bind={task.root}:{LIGHTHOUSE}"])
