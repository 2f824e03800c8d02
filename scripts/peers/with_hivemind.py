"""hivemind: local updates, the mean of parameters in 16 bits by all-reduce, a DHT."""

import pathlib
import time

import hivemind
from hivemind import compression

from scripts.peers import task as task_lib
from scripts.peers import torch_model


def table(task: task_lib.Task) -> hivemind.DHT:
    """Returns the distributed hash table by which the two find each other."""
    path, known = pathlib.Path(task.folder, "root_address"), []
    while task.worker and not (
        known := path.read_text().split() if path.exists() else []
    ):
        time.sleep(0.1)
    maddr = f"/ip4/{task.host}/tcp/0"
    found = hivemind.DHT(host_maddrs=[maddr], initial_peers=known, start=True)
    if not task.worker:
        path.write_text(" ".join(str(each) for each in found.get_visible_maddrs()))
    return found


def meet(task: task_lib.Task, what: str) -> None:
    """Waits until both peers are so far."""
    own, other = (
        pathlib.Path(task.folder, f"{what}{number}")
        for number in (task.worker, 1 - task.worker)
    )
    own.touch()
    while not other.exists():
        time.sleep(0.1)


def train(task: task_lib.Task) -> None:
    """Trains as one of two peers."""
    worker, dht = torch_model.Worker(task), table(task)
    averaged = worker.inner = hivemind.Optimizer(
        dht=dht,
        run_id="bench",
        batch_size_per_step=task.batch,
        target_batch_size=2 * task.batch * task.inner_steps,
        optimizer=worker.inner,
        use_local_updates=True,
        delay_state_averaging=False,
        matchmaking_time=3.0,
        averaging_timeout=300.0,
        state_averaging_compression=compression.Float16Compression(),
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5},
    )
    # Who is alone trains alone: there is no number of peers to wait for.
    meet(task, "ready")
    number, epoch = 0, 0
    while epoch < task.rounds:
        number += 1
        worker.step(number)
        if averaged.local_epoch > epoch:
            epoch = averaged.local_epoch
            worker.log.round(epoch)
    worker.log.end(worker.loss())
    meet(task, "done")  # the other may still average with this one
    averaged.shutdown()
    dht.shutdown()
