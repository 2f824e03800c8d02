"""Hugging Face accelerate: LocalSGD, the mean of parameters, no outer optimizer."""

import os

import accelerate
import torch
from accelerate import local_sgd

from scripts.peers import task as task_lib
from scripts.peers import torch_model


def main() -> None:
    """Trains as one of two processes of a gloo group."""
    task = task_lib.of_command()
    os.environ |= {"MASTER_ADDR": task.root, "MASTER_PORT": "29500"}
    os.environ |= {"RANK": str(task.worker), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"GLOO_SOCKET_IFNAME": task.device, "ACCELERATE_USE_CPU": "1"}
    torch.set_num_threads(1)
    log, model = task_lib.Log(task), torch_model.Model(task)
    accelerator = accelerate.Accelerator(cpu=True)
    inner = torch_model.optimizer(task, model)
    wrapped, inner = accelerator.prepare(model, inner)
    every = task.inner_steps
    with local_sgd.LocalSGD(accelerator, wrapped, every, enabled=True) as averaged:
        for number in range(1, task.steps + 1):
            torch_model.step(task, log, number, wrapped, inner)
            inner.step()
            averaged.step()
            if number % every == 0:
                log.round(number // every)
    log.end(torch_model.held_out_loss(task, model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
