"""The task's model in PyTorch, for the frameworks that train PyTorch's."""

import numpy as np
import torch

from scripts.peers import task as task_lib


class Model(torch.nn.Module):
    """The next byte from those before it."""

    def __init__(self, task: task_lib.Task) -> None:
        """Begins with the task's parameters."""
        super().__init__()
        for name, value in task.parameters().items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of rows [B, CONTEXT + 1], in nats."""
        gelu = torch.nn.functional.gelu
        x = self.embedding[rows[:, :-1]].flatten(1)
        x = gelu(x @ self.first + self.first_bias)
        x = gelu(x @ self.second + self.second_bias)
        logits = x @ self.head + self.head_bias
        return torch.nn.functional.cross_entropy(logits, rows[:, -1].long())


def optimizer(task: task_lib.Task, model: Model) -> torch.optim.Optimizer:
    """Returns that of the inner steps: AdamW as optax has it."""
    return torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=1e-4)


def step(
    task: task_lib.Task,
    log: task_lib.Log,
    number: int,
    model: Model,
    inner: torch.optim.Optimizer,
) -> None:
    """Computes the gradients of a step; the framework's optimizer takes it then."""
    log.begin_step()
    inner.zero_grad()
    model(torch.from_numpy(task.rows(number))).backward()
    log.end_step()


def held_out_loss(task: task_lib.Task, model: Model) -> float:
    """Returns the held-out loss, in nats."""
    with torch.no_grad():
        parts = np.array_split(task.held_out(), 8)
        return float(np.mean([float(model(torch.from_numpy(part))) for part in parts]))
