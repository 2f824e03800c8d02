"""Hugging Face accelerate: LocalSGD, the mean of parameters, no outer optimizer."""

import os

import accelerate
from accelerate import local_sgd

from scripts.peers import task as task_lib
from scripts.peers import torch_model


def train(task: task_lib.Task) -> None:
    """Trains as one of two processes of a gloo group."""
    torch_model.name_group(task)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    worker, every = torch_model.Worker(task), task.inner_steps
    accelerator = accelerate.Accelerator(cpu=True)
    worker.model, worker.inner = accelerator.prepare(worker.model, worker.inner)
    with local_sgd.LocalSGD(accelerator, worker.model, every, enabled=True) as averaged:
        for number in range(1, task.steps + 1):
            worker.step(number)
            averaged.step()
            if number % every == 0:
                worker.log.round(number // every)
    worker.log.end(worker.loss())
    accelerator.end_training()
