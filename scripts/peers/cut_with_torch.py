"""PyTorch: the cut by `torch.distributed.pipelining` over gloo, the schedule GPipe."""

import torch
from torch import distributed
from torch.distributed import pipelining
from torch.nn import functional

from scripts.peers import task as task_lib
from scripts.peers import torch_model, translator


def _normal(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _attend(*heads: torch.Tensor, is_causal: bool) -> torch.Tensor:
    own = [each.transpose(1, 2) for each in heads]  # [B, H, L, K]
    attend = functional.scaled_dot_product_attention
    return attend(*own, is_causal=is_causal).transpose(1, 2)


OPERATIONS = translator.Operations(functional.gelu, _normal, _attend)


class Part(torch_model.Module):
    """One side of the cut."""

    def forward(
        self, x: torch.Tensor, given: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns hidden states of ids [B, L], or of those the logits [B, V, L]."""
        if given is None:
            return translator.hidden(OPERATIONS, self.values, x)
        return translator.logits(OPERATIONS, self.values, given, x).transpose(1, 2)


def train(task: task_lib.Task) -> None:
    """Trains as one of two stages."""
    torch_model.name_group(task)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    name = list(translator.LAYERS)[task.worker]
    part = Part(translator.parameters(name))
    stage = pipelining.PipelineStage(part, task.worker, 2, torch.device("cpu"))
    count, loss = translator.MICRO_BATCHES, functional.cross_entropy
    schedule = pipelining.ScheduleGPipe(stage, count, loss)
    log, optimizer = task_lib.Log(task), torch_model.adamw(task, part)
    losses: list[float] = []
    for step in range(1, task.steps + 1):
        source, given, wanted = (
            torch.from_numpy(each).long() for each in translator.batch(task, step)
        )
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        if task.worker:
            schedule.step(given=given, target=wanted, losses=found)
        else:
            schedule.step(source)
        optimizer.step()
        losses += [float(torch.stack(found).detach().mean())] if found else []
        log.round(step)
    log.end(translator.loss(losses))
    distributed.destroy_process_group()
