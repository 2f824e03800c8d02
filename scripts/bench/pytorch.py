"""The steps of `bench_training` in PyTorch, with transformers' BERT.

They need the packages of requirements-parity.txt.

B batch, L length.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.training import masking
from scripts.bench import shapes


def is_installed() -> bool:
    """Returns True if PyTorch and transformers are installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return False
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA has
    return True


def fine_tuning(shape: shapes.Shape, dtype: str) -> shapes.Step:
    """Makes a step of fine-tuning with frozen embeddings."""
    import torch
    import transformers

    config = _config(shape, transformers)
    config.num_labels = 3
    model = transformers.BertForSequenceClassification(config)
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    ids, right = (
        torch.from_numpy(np.asarray(each, np.int64))
        for each in (shape.ids(), shape.labels())
    )
    return _step(torch, model, dtype, lambda: model(input_ids=ids, labels=right).loss)


def masked_lm(shape: shapes.Shape, dtype: str) -> shapes.Step:
    """Makes a generator's step: logits and samples at masked positions only."""
    import torch
    import transformers

    model = transformers.BertForMaskedLM(_config(shape, transformers))
    ids = torch.from_numpy(np.asarray(shape.ids(), np.int64))
    count = masking.capacity(shapes.MASK_RATE, shape.length)

    def loss():
        where = torch.topk(torch.rand(ids.shape), count, dim=1).indices
        right = torch.gather(ids, 1, where)
        corrupted = torch.scatter(ids, 1, where, vocabularies.SPECIAL.mask)
        hidden = model.bert(input_ids=corrupted).last_hidden_state
        rows = torch.gather(hidden, 1, where[..., None].expand(-1, -1, shape.width))
        logits = model.cls(rows).float()
        noise = torch.empty_like(logits).exponential_().log_()
        torch.argmax(logits.detach() - noise, dim=-1)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), right.flatten())

    return _step(torch, model, dtype, loss)


def _config(shape: shapes.Shape, transformers: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _step(torch: Any, model: Any, dtype: str, loss: Callable[[], Any]) -> shapes.Step:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=shapes.RATE, eps=1e-6, weight_decay=0.0, fused=True
    )
    model.train()

    def run():
        cast = contextlib.nullcontext()
        if dtype == "bfloat16":
            cast = torch.autocast("cpu", dtype=torch.bfloat16)
        optimizer.zero_grad(set_to_none=True)
        with cast:
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(value.detach())

    return run
