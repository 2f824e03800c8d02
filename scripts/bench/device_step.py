"""A step of masked language modeling on one device, for `bench_device`: a child of it.

    python -m scripts.bench.device_step [--tiny] [--rounds=N] RUNG

compiles and measures it, and prints a JSON line: time and rate of a step, losses, and
the digest of the parameters. `torch` is PyTorch's step. A step has logits at masked
places; AdamW with clipping follows. Weights and text are random, rows are full.
B batch, L length.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import statistics
import sys
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.training import bert, masking

RATE, MASK_RATE = 1e-4, 0.15
WARM = 3  # steps before those that are timed
STEPS = 5  # of a round


BASE = transformer.Config(
    vocab_size=30_522,
    layers=12,
    width=768,
    heads=12,
    feed_forward=3072,
    max_length=512,
    dtype="bfloat16",
)


@dataclasses.dataclass(frozen=True)
class Rung:
    """The settings of a step."""

    about: str
    model: transformer.Config = BASE
    batch: int = 64
    is_fused: bool = True  # attention in one operation; False for the model's own

    def tiny(self) -> "Rung":
        """Returns a tiny model and batch with these settings."""
        small = {"vocab_size": 200, "layers": 1, "width": 32, "heads": 2}
        model = dataclasses.replace(self.model, **small, feed_forward=64, max_length=32)
        return dataclasses.replace(self, model=model, batch=4)

    def ids(self) -> np.ndarray:
        """Draws ids: [B, L] int32, no padding."""
        size = self.batch, self.model.max_length
        random = np.random.RandomState(0)
        ids = random.randint(vocabularies.NUM_SPECIAL, self.model.vocab_size, size)
        ids[:, 0], ids[:, -1] = vocabularies.SPECIAL.cls, vocabularies.SPECIAL.sep
        return ids.astype(np.int32)


FLOAT32 = dataclasses.replace(BASE, dtype="float32")
RUNGS = {
    "float32": Rung("float32", FLOAT32, is_fused=False),
    "bfloat16": Rung("operands in bfloat16", is_fused=False),
    "fused": Rung("attention in one operation"),
    "double": Rung("twice the batch", batch=128),
    "torch": Rung("PyTorch: compiled, SDPA, bfloat16"),
    "short": Rung("four layers", dataclasses.replace(BASE, layers=4)),
}


def flops_per_token(model: transformer.Config) -> float:
    """Counts a token's operations in a step's matrix products, forward and backward."""
    width, length = model.width, model.max_length
    block = 4 * width * width + 2 * width * model.feed_forward
    head = width * width + width * model.vocab_size
    share = masking.capacity(MASK_RATE, length) / length
    attention = 2 * length * width  # queries by keys, and shares by values
    return 6.0 * (model.layers * (block + attention) + share * head)


def _fused(
    query: jax.Array,
    memory: transformer.KeyValues,
    attention_mask: jax.Array,
    config: transformer.Config,
    drop: Any,
) -> jax.Array:
    """Computes `transformer.attend` in one operation, by cuDNN on GPUs; mask [B, L]."""
    del drop  # none here
    query, key, value = (each.astype(config.operands) for each in (query, *memory))
    rows, length = attention_mask.shape
    mask = attention_mask[:, None, None, :]
    is_gpu = jax.default_backend() == "gpu"
    attended = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=jnp.broadcast_to(mask, (rows, 1, length, length)),
        implementation="cudnn" if is_gpu else "xla",
    )
    return attended.astype(jnp.float32)


class Step:
    """A step of ours, compiled, and the state that it trains."""

    def __init__(self, rung: Rung) -> None:
        config = bert.Config(
            rung.model,
            steps=10_000,
            mask_rate=MASK_RATE,
            learning_rate=RATE,
        )
        state, frozen = jax.eval_shape(functools.partial(bert.init, config, 0))
        assert not frozen
        rest = frozen, rung.ids(), np.zeros((), np.int32)
        step = jax.jit(functools.partial(bert.step, config), donate_argnums=0)
        with contextlib.ExitStack() as stack:
            if rung.is_fused:
                stack.enter_context(mock.patch.object(transformer, "attend", _fused))
            self._step = step.lower(state, *rest).compile()
        # Drawn here: compiling `bert.init` for a GPU takes a minute.
        random = np.random.default_rng(0)

        def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            return 0.02 * random.standard_normal(leaf.shape, np.float32)

        def zeros(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            return np.zeros(leaf.shape, leaf.dtype)

        params = jax.tree.map(draw, state.params)
        state = dataclasses.replace(jax.tree.map(zeros, state), params=params)
        self.state, self._rest = jax.device_put((state, rest))

    def __call__(self) -> jax.Array:
        """Takes a step; returns its loss, which nobody has waited for."""
        self.state, metrics = self._step(self.state, *self._rest)
        return metrics["loss"]

    def about(self) -> dict[str, Any]:
        """Returns the digest of the parameters and the most memory that was taken."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(jax.device_get(self.state.params)):
            digest.update(np.ascontiguousarray(leaf).tobytes())
        memory = jax.devices()[0].memory_stats() or {}
        return {
            "digest": digest.hexdigest()[:16],
            "peak_gib": memory.get("peak_bytes_in_use", 0) / 2**30,
        }


class PyTorchStep:
    """A step of PyTorch: compiled, its own attention, autocast to bfloat16."""

    def __init__(self, rung: Rung) -> None:
        import torch
        import transformers

        self._torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_float32_matmul_precision("high")
        config = transformers.BertConfig(
            vocab_size=rung.model.vocab_size,
            hidden_size=rung.model.width,
            num_hidden_layers=rung.model.layers,
            num_attention_heads=rung.model.heads,
            intermediate_size=rung.model.feed_forward,
            max_position_embeddings=rung.model.max_length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        self.model = transformers.BertForMaskedLM(config).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, eps=1e-6, fused=True
        )
        self.ids = torch.from_numpy(np.asarray(rung.ids(), np.int64)).to(self.device)
        self.count = masking.capacity(MASK_RATE, rung.model.max_length)
        self._compiled = torch.compile(self._loss)
        float(self())

    def _loss(self, where: Any) -> Any:
        torch, width = self._torch, self.model.config.hidden_size
        corrupted = torch.scatter(self.ids, 1, where, vocabularies.SPECIAL.mask)
        hidden = self.model.bert(input_ids=corrupted).last_hidden_state
        rows = torch.gather(hidden, 1, where[..., None].expand(-1, -1, width))
        logits = self.model.cls(rows).flatten(0, 1).float()
        right = torch.gather(self.ids, 1, where).flatten()
        return torch.nn.functional.cross_entropy(logits, right)

    def __call__(self) -> Any:
        """Takes a step; returns its loss, which nobody has waited for."""
        torch = self._torch
        noise = torch.rand(self.ids.shape, device=self.device)
        where = noise.topk(self.count, dim=1).indices
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self._compiled(where)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def about(self) -> dict[str, Any]:
        """Returns the most memory that was taken."""
        if self.device == "cpu":
            return {}
        return {"peak_gib": self._torch.cuda.max_memory_allocated() / 2**30}


def measure(name: str, tiny: bool, rounds: int) -> dict[str, Any]:
    """Compiles and measures a rung, in rounds of STEPS steps: see the module."""
    rung = RUNGS[name].tiny() if tiny else RUNGS[name]
    begin = time.perf_counter()
    step = PyTorchStep(rung) if name == "torch" else Step(rung)
    compiling = time.perf_counter() - begin
    losses = [float(step()) for _ in range(WARM)]
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        losses.append(float(loss))  # waits for all of them
        seconds.append((time.perf_counter() - begin) / STEPS)
    length = rung.model.max_length
    tokens = rung.batch * length / statistics.median(seconds)
    return {
        "about": rung.about,
        "compile_s": compiling,
        "batch": rung.batch,
        "length": length,
        "ms": 1e3 * statistics.median(seconds),
        "tokens_per_second": tokens,
        "teraflops": tokens * flops_per_token(rung.model) / 1e12,
        "losses": losses,
        **step.about(),
    }


def main(arguments: list[str]) -> int:
    """Measures the rung that is named."""
    name, *options = sorted(arguments, key=lambda each: each.startswith("-"))
    rounds = [int(each[9:]) for each in options if each.startswith("--rounds=")]
    try:
        found = measure(name, "--tiny" in options, (rounds or [5])[0])
    except (ImportError, RuntimeError) as error:  # absent, or out of memory
        found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
