"""Steps of masked language modeling on one device, for `bench_device`: a child of it.

    python -m scripts.bench.device_step [--tiny] [--rounds=N] RUNG ...

prints a JSON line for each rung: seconds of compiling and of a step, tokens/s, the
losses, and the digest of the parameters. `torch` is PyTorch's step. Each rung has the
settings of the one before it and one more.

A step masks, embeds, and has logits at masked places unless it says otherwise; AdamW
with clipping follows. Weights and text are random, rows are full.

B batch, L length.
"""

import dataclasses
import functools
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.models import mixed_precision
from nebula_jax.training import bert, masking
from scripts.bench.shapes import MASK_RATE, RATE, Shape

BASE = Shape("masked LM", 12, 768, 12, 3072, 30_522, 64, 512)
TINY = Shape("masked LM", 1, 32, 2, 64, 200, 4, 32)
WARM = 3  # steps before those that are timed
STEPS = 5  # of a round


@dataclasses.dataclass(frozen=True)
class Rung:
    """The settings of a step."""

    about: str
    dtype: str = "bfloat16"
    logits: str = "masked"
    attention: str = "fused"
    results: str = "float32"
    """In which matrix products are stored; they are summed in float32 anyway."""
    times: int = 1
    """The batch, in multiples of the shape's."""
    layers: int = 0
    """Of the model; 0 for those of the shape."""


_PLAIN = Rung("float32, logits everywhere", "float32", "all", "einsum")
RUNGS = {
    "float32": _PLAIN,
    "bfloat16": Rung("operands in bfloat16", "bfloat16", "all", "einsum"),
    "masked": Rung("logits at masked places only", attention="einsum"),
    "cudnn": Rung("cuDNN's attention"),
    "stored": Rung("products stored in bfloat16", results="bfloat16"),
    "double": Rung("twice the batch", results="bfloat16", times=2),
    "double_float32": Rung("twice the batch, products in float32", times=2),
    # Not part of the ladder: few layers, to be compiled twice.
    "short": Rung("four layers", layers=4),
}


def flops_per_token(shape: Shape) -> float:
    """Counts the operations of a step that a token needs, forward and backward.

    Those of matrix products: of the blocks, of attention, of the head at masked places.
    What an implementation computes beside (logits elsewhere) does not count.
    """
    width, length = shape.width, shape.length
    block = 4 * width * width + 2 * width * shape.feed_forward
    head = width * width + width * shape.vocab_size
    share = masking.capacity(MASK_RATE, length) / length
    attention = 2 * length * width  # queries by keys, and shares by values
    return 6.0 * (shape.layers * (block + attention) + share * head)


def shape_of(rung: Rung, tiny: bool) -> Shape:
    """Returns the model and the batch of a rung."""
    shape = TINY if tiny else BASE
    layers = min(rung.layers, shape.layers) or shape.layers
    return shape._replace(batch=shape.batch * rung.times, layers=layers)


def _stored_in_bfloat16(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes a product that is rounded once to the operands' type, and widened."""
    product = jnp.einsum(subscripts, a, b, preferred_element_type=a.dtype)
    return product.astype(jnp.float32)


def steps_of(rung: Rung, shape: Shape) -> Iterator[tuple[Any, dict[str, jax.Array]]]:
    """Trains for ever; yields parameters and metrics after each step, not waited for.

    The first one is compiled when it is asked for.
    """
    encoder = dataclasses.replace(
        shape.config(rung.dtype), token_types=0, attention=rung.attention
    )
    config = bert.Config(
        encoder,
        steps=10_000,
        mask_rate=MASK_RATE,
        logits=rung.logits,
        learning_rate=RATE,
    )
    state, frozen = jax.jit(functools.partial(bert.init, config, 0))()
    step = jax.jit(functools.partial(bert.step, config), donate_argnums=0)
    ids, zero = jnp.asarray(shape.ids()), jnp.zeros((), jnp.int32)
    product = mixed_precision._product
    if rung.results == "bfloat16":
        product = _stored_in_bfloat16
    while True:
        with mock.patch.object(mixed_precision, "_product", product):
            state, metrics = step(state, frozen, ids, zero, jnp.zeros(()))
        yield state.params, metrics


def measure(name: str, tiny: bool, rounds: int) -> dict[str, Any]:
    """Measures a rung's step: see the module."""
    rung = RUNGS[name]
    shape = shape_of(rung, tiny)
    begin = time.perf_counter()
    steps = steps_of(rung, shape)
    losses = [float(next(steps)[1]["loss"])]
    compiled = time.perf_counter() - begin
    losses += [float(next(steps)[1]["loss"]) for _ in range(WARM)]
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(STEPS):
            params, metrics = next(steps)
        losses.append(float(metrics["loss"]))  # waits for all of them
        seconds.append((time.perf_counter() - begin) / STEPS)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(params)):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    steps.close()
    memory = jax.devices()[0].memory_stats() or {}
    found = figures(rung.about, shape, compiled, seconds, losses)
    return found | {
        "digest": digest.hexdigest()[:16],
        "peak_gib": memory.get("peak_bytes_in_use", 0) / 2**30,
    }


def figures(
    about: str, shape: Shape, compiled: float, seconds: list[float], losses: list[float]
) -> dict[str, Any]:
    """Returns what is recorded of a step, of `rounds` means in seconds."""
    tokens = shape.batch * shape.length / statistics.median(seconds)
    return {
        "about": about,
        "batch": shape.batch,
        "length": shape.length,
        "compile_s": compiled,
        "ms": 1e3 * statistics.median(seconds),
        "fastest_ms": 1e3 * min(seconds),
        "slowest_ms": 1e3 * max(seconds),
        "tokens_per_second": tokens,
        "teraflops": tokens * flops_per_token(shape) / 1e12,
        "losses": losses,
    }


def measure_pytorch(tiny: bool, rounds: int) -> dict[str, Any]:
    """Measures PyTorch's step: compiled, autocast to bfloat16, its own attention."""
    import torch
    import transformers

    shape = shape_of(RUNGS["cudnn"], tiny)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    config = transformers.BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    model = transformers.BertForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-6, fused=True)
    ids = torch.from_numpy(np.asarray(shape.ids(), np.int64)).to(device)
    count = masking.capacity(MASK_RATE, shape.length)

    def loss_of(where: Any) -> Any:
        corrupted = torch.scatter(ids, 1, where, 3)
        hidden = model.bert(input_ids=corrupted).last_hidden_state
        rows = torch.gather(hidden, 1, where[..., None].expand(-1, -1, shape.width))
        logits = model.cls(rows).flatten(0, 1)
        right = torch.gather(ids, 1, where).flatten()
        return torch.nn.functional.cross_entropy(logits.float(), right)

    compiled_loss = torch.compile(loss_of)

    def step() -> Any:
        where = torch.rand(ids.shape, device=device).topk(count, dim=1).indices
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled_loss(where)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    begin = time.perf_counter()
    losses = [float(step())]
    compiled = time.perf_counter() - begin
    losses += [float(step()) for _ in range(WARM)]
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        losses.append(float(loss))
        seconds.append((time.perf_counter() - begin) / STEPS)
    about = f"PyTorch {torch.__version__}, torch.compile, SDPA, bfloat16"
    return figures(about, shape, compiled, seconds, losses)


def main(arguments: list[str]) -> int:
    """Measures the rungs that are named, one after the other."""
    tiny, rounds = "--tiny" in arguments, 5
    names = []
    for each in arguments:
        if each.startswith("--rounds="):
            rounds = int(each.partition("=")[2])
        elif not each.startswith("--"):
            names.append(each)
    for name in names:
        try:
            if name == "torch":
                found = measure_pytorch(tiny, rounds)
            else:
                found = measure(name, tiny, rounds)
        except (ImportError, RuntimeError) as error:  # absent, or out of memory
            found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        print(json.dumps({"rung": name} | found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
