"""The task's model in PyTorch, for the frameworks that train PyTorch's."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from scripts.peers import task as task_lib


class Module(torch.nn.Module):
    """A module with parameters by name."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.values = torch.nn.ParameterDict(
            {name: torch.from_numpy(value) for name, value in values.items()}
        )


class Model(Module):
    """The model of local steps."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of rows [B, CONTEXT + 1], in nats."""
        logits = task_lib.logits(functional.gelu, self.values, rows)
        return functional.cross_entropy(logits, rows[:, -1].long())


class Worker:
    """A worker that trains by PyTorch; a framework may replace `model` and `inner`."""

    def __init__(self, task: task_lib.Task) -> None:
        torch.set_num_threads(1)
        self.task, self.log = task, task_lib.Log(task)
        self.model: torch.nn.Module = Model(task.parameters())
        self.inner: Any = adamw(task, self.model)  # optimizer of the inner steps

    def step(self, number: int) -> None:
        """Takes the step of this number."""
        with self.log.computing():
            self.inner.zero_grad()
            self.model(torch.from_numpy(self.task.rows(number))).backward()
        self.inner.step()  # in which some frameworks send

    def loss(self) -> float:
        """Returns the held-out loss, in nats."""
        with torch.no_grad():
            parts = map(torch.from_numpy, np.array_split(self.task.held_out(), 8))
            return float(np.mean([float(self.model(part)) for part in parts]))


def adamw(task: task_lib.Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW as optax has it."""
    return torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=1e-4)


def name_group(task: task_lib.Task) -> None:
    """Sets the variables by which gloo finds the group of both workers."""
    os.environ |= {"MASTER_ADDR": task.root, "MASTER_PORT": "29500"}
    os.environ |= {"RANK": str(task.worker), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"GLOO_SOCKET_IFNAME": task.device}
