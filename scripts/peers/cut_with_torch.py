"""PyTorch: the cut by `torch.distributed.pipelining` over gloo, the schedule GPipe."""

from typing import Any

import torch
from torch import distributed
from torch.distributed import pipelining
from torch.nn import functional

from scripts.peers import task as task_lib
from scripts.peers import torch_model, translator

PARTS = ("source", "target")
EPSILON = 1e-12  # of BERT's layer norms


class Part(torch.nn.Module):
    """A part of the encoder-decoder, with the parameters of `nebula_jax.models.abnet`.

    B batch, L length, D width, H heads, K head width.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        """Begins with these values, by their paths there."""
        super().__init__()
        self.at = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(torch.from_numpy(v))
                for name, v in values.items()
            }
        )

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of ids [B, L]: [B, L, D]."""
        words, places = (
            self.at[f"embeddings/{name}_embeddings/embedding"]
            for name in ("word", "position")
        )
        return self.normal("embeddings/layer_norm", words[ids] + places)

    def dense(self, name: str, x: torch.Tensor, axes: int = 1) -> torch.Tensor:
        """Applies a linear layer to the last `axes` axes."""
        found = torch.tensordot(x, self.at[f"{name}/kernel"], axes)
        return found + self.at[f"{name}/bias"] if f"{name}/bias" in self.at else found

    def normal(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Applies a layer norm."""
        scale, bias = (self.at[f"{name}/{each}"] for each in ("scale", "bias"))
        return functional.layer_norm(x, x.shape[-1:], scale, bias, EPSILON)

    def attended(
        self,
        prefix: str,
        x: torch.Tensor,
        memory: torch.Tensor,
        output: str,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attends from x [B, L, D] to memory [B, L, D]."""
        names = {"query": x, "key": memory, "value": memory}
        heads = [
            self.dense(f"{prefix}/{name}", each).transpose(1, 2)  # [B, H, L, K]
            for name, each in names.items()
        ]
        attend = functional.scaled_dot_product_attention
        context = attend(*heads, is_causal=is_causal).transpose(1, 2)
        return self.dense(f"{prefix}/{output}", context, axes=2)

    def block(self, layer: int, x: torch.Tensor, is_causal: bool) -> torch.Tensor:
        """Applies a layer of the encoder."""
        path = f"encoder/layer_{layer}"
        attended = self.attended(f"{path}/attention", x, x, "output", is_causal)
        x = self.normal(f"{path}/attention_layer_norm", x + attended)
        inner = functional.gelu(self.dense(f"{path}/intermediate", x))
        return self.normal(
            f"{path}/output_layer_norm", x + self.dense(f"{path}/output", inner)
        )


class Source(Part):
    """The source side."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states of ids [B, L]: [B, L, D]."""
        x = self.embedded(ids)
        for layer in range(translator.SOURCE_LAYERS):
            x, path = self.block(layer, x, is_causal=False), f"adapters_{layer}"
            normal = self.normal(f"{path}/layer_norm", x)
            inner = functional.relu(self.dense(f"{path}/down", normal))
            x = x + self.dense(f"{path}/up", inner)
        return x


class Target(Part):
    """The target side."""

    def forward(self, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Returns the logits [B, L, V] behind given [B, L]."""
        x = self.embedded(given)
        for layer in range(translator.TARGET_LAYERS):
            x, path = self.block(layer, x, is_causal=True), f"adapters_{layer}"
            context = self.attended(path, x, hidden, "attention_output")
            x = self.normal(f"{path}/attention_layer_norm", x + context)
            inner = functional.relu(self.dense(f"{path}/intermediate", x))
            outer = self.dense(f"{path}/output", inner)
            x = self.normal(f"{path}/output_layer_norm", x + outer)
        x = functional.gelu(self.dense("mlm_head/dense", x))
        x = self.normal("mlm_head/layer_norm", x)
        table = self.at["embeddings/word_embeddings/embedding"]
        return x @ table.T + self.at["mlm_head/bias"]


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def main() -> None:
    """Trains as one of two stages."""
    task = task_lib.of_command()
    torch_model.name_group(task)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    part = [Source, Target][task.worker](
        translator.parameters(task, PARTS[task.worker])
    )
    stage = pipelining.PipelineStage(part, task.worker, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, translator.MICRO_BATCHES, loss_of)
    log, optimizer = task_lib.Log(task), torch_model.adamw(task, part)
    losses = []
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
        losses += [float(torch.stack(found).mean())] if found else []
        log.round(step)
    log.end(translator.loss(losses) if losses else None)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
