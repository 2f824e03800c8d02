"""Makes the tensors of `compression.ipynb`: what crosses a cut through a trained model.

    scripts/run python -m notebooks.activations runs/m3_quickstart notebooks/tensors.npz

A finished M3 run gives the parameters and the text. Its discriminator is cut between
two encoder blocks, as ABNet-Cloud cuts its encoder from its decoder (section 3.2): the
hidden states there go one way, the gradient with respect to them comes back.

N batches, B rows, a long line of each language, L length, D width.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments import configuration
from experiments.m3 import config as m3_config
from experiments.m3 import evaluate, models
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax.commands import fields
from nebula_jax.data import packed_sequences, resumable_batches, text_folder
from nebula_jax.training import m3, m3_predictions

BATCHES = 3  # N


def crossing(
    config: m3.Config, cut: int, params: Any, tokens: m3.Tokens
) -> tuple[jax.Array, jax.Array]:
    """Returns what crosses a cut through the discriminator in one step.

    Args:
      config: of the run, without dropout.
      cut: blocks below the cut, at least 1.
      params: of the discriminator.
      tokens: what the generators sent.

    Returns:
      hidden: [B, L, D] float32, output of the last block below the cut.
      gradient: [B, L, D] float32, of the discriminator's loss with respect to it.
    """
    path = "encoder", f"layer_{cut - 1}"

    def loss(added: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the loss if this is added to the hidden states, and these."""
        found = []

        def tap(call, args, kwargs, context):
            output = call(*args, **kwargs)
            if (context.module.path, context.method_name) != (path, "__call__"):
                return output
            found.append(output)
            return output + added

        with nn.intercept_methods(tap):
            value, _ = m3.discriminator_loss(config, params, jax.random.key(0), tokens)
        (hidden,) = found
        return value, hidden

    shape = (*tokens.input_ids.shape, config.discriminator.width)
    gradient, hidden = jax.grad(loss, has_aux=True)(jnp.zeros(shape))
    return hidden, gradient


def tensors(run: m3_config.Run) -> dict[str, np.ndarray]:
    """Returns what crosses the middle of a finished run's discriminator.

    Returns:
      mask [N, B, L] bool, false at padding; hidden and gradient [N, B, L, D] float32.
    """
    vocabulary = shared_vocabulary.given(run.local)
    made = models.load(run, vocabulary).config
    discriminator = dataclasses.replace(made.discriminator, dropout=0.0)
    made = dataclasses.replace(made, discriminator=discriminator, micro_batches=1)
    _, (params, *generators) = evaluate.trained(run)
    folder, length = text_lib.folder(run.local), run.agreed.max_length
    cut = discriminator.layers // 2

    def line_of(language: str, number: int) -> np.ndarray:
        """Returns [L] int32, a row of one of the longest lines, padded."""
        path = text_folder.mono_path(folder, language, "valid")
        line = sorted(text_folder.read_mono(path), key=len)[-1 - number]
        row = next(packed_sequences.pack_mono([vocabulary.encode(line)], length))
        return resumable_batches.pad(np.asarray(row, np.int32), length)

    corrupt = jax.jit(functools.partial(m3_predictions.corrupt, made))
    cross = jax.jit(functools.partial(crossing, made, cut))
    found = []
    for number in range(BATCHES):
        parts = []
        for index, group in enumerate(run.agreed.groups()):
            ids = np.stack([line_of(language, number) for language in group])
            rng = jax.random.fold_in(jax.random.key(index), number)
            parts.append(corrupt(generators[index], rng, ids))
        tokens = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
        mask = m3.inputs_of(tokens).attention_mask
        found.append((mask, *cross(params, tokens)))
    names = "mask", "hidden", "gradient"
    arrays = map(np.stack, zip(*jax.device_get(found), strict=True))
    return dict(zip(names, arrays, strict=True))


def main(folder: str, out: str) -> None:
    """Writes the tensors of the run in `folder`."""
    flags = configuration.flags_of_run(folder, "pretrain_m3")
    read = functools.partial(fields.read, given=flags)
    run = m3_config.Run(read(m3_config.Agreed), read(m3_config.Local))
    np.savez_compressed(pathlib.Path(out), **tensors(run))


if __name__ == "__main__":
    main(*sys.argv[1:])
