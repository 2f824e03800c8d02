"""The parameters of an ABNet: random, with pretrained models in them, which train.

D width, V vocabulary of T.
"""

import re

import jax
import jax.numpy as jnp
from flax import traverse_util

from nebula_jax import errors
from nebula_jax.models import abnet, adapters, transformer

RANDOM_PIECES = (8, 16)  # rows and length: enough for a mean over pieces and units


def init_source(config: abnet.Config, rng: jax.Array) -> abnet.Params:
    """Random parameters of a Source."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return abnet.Source(config).init(rng, ids, ids == 0)["params"]


def init_target(config: abnet.Config, rng: jax.Array) -> abnet.Params:
    """Random parameters of a Target."""
    ids = jnp.zeros((1, 1), jnp.int32)
    hidden = jnp.zeros((1, 1, config.source.width))
    return abnet.Target(config).init(rng, ids, ids == 0, hidden, ids == 0)["params"]


def with_pretrained(
    config: abnet.Config, params: abnet.Params, pretrained: abnet.Params
) -> abnet.Params:
    """A Source's or Target's parameters with a pretrained model in them.

    Decoder adapters' layer norms are matched to what the model says of random pieces
    (`adapters.matched`): no text is needed, and text would give nearly the same.

    Args:
      config: of the translator.
      params: from `init_source` or `init_target`.
      pretrained: `embeddings`, `encoder` and perhaps `mlm_head`, as the modules of
        these names make them. A head for which there is no place, and one that the
        model lacks, are left out.

    Returns:
      Parameters of the same shapes.

    Raises:
      NebulaError: if the model has other shapes than `params`.
    """
    parts = [
        part
        for part in ("embeddings", "encoder", "mlm_head")
        if part in params and (part != "mlm_head" or part in pretrained)
    ]
    new = params | {part: pretrained.get(part, {}) for part in parts}
    _check_shapes(params, new)
    if "mlm_head" in params:  # a Target
        for layer, said in enumerate(_layers_of_random_pieces(config.target, new)):
            name = f"adapters_{layer}"
            new[name] = adapters.matched(params[name], said)
    return new


def _layers_of_random_pieces(
    config: transformer.Config, pretrained: abnet.Params
) -> list[jax.Array]:
    """What each frozen layer says without adapters, [B, L, D] float32 each."""
    length = min(RANDOM_PIECES[1], config.max_length)
    ids = jax.random.randint(
        jax.random.key(0), (RANDOM_PIECES[0], length), 0, config.vocab_size
    )

    @jax.jit
    def read(pretrained):
        said = []

        def listen(layer, hidden):
            said.append(hidden)
            return hidden

        hidden = transformer.Embeddings(config).apply(
            {"params": pretrained["embeddings"]}, ids, True
        )
        transformer.Encoder(config).apply(
            {"params": pretrained["encoder"]}, hidden, ids >= 0, True, listen
        )
        return said

    return read({part: pretrained[part] for part in ("embeddings", "encoder")})


def _check_shapes(want: abnet.Params, got: abnet.Params) -> None:
    def shapes(tree):
        flat = traverse_util.flatten_dict(tree, sep="/")
        return {path: leaf.shape for path, leaf in flat.items()}

    want, got = shapes(want), shapes(got)
    for path in sorted(want | got):
        if want.get(path) != got.get(path):
            raise errors.NebulaError(
                f"pretrained model: {path} is {got.get(path, 'missing')};"
                f" this configuration has {want.get(path, 'no such parameter')}"
            )


def is_trained(path: str, mlm_head: bool = False) -> bool:
    """Whether ABNet trains a parameter: adapters and the length table, no more.

    Args:
      path: of a Source's or Target's parameter, as in `adapters_0/down/kernel`.
      mlm_head: train the MLM head as well, where the checkpoint had none. (The table
        that it is tied to stays frozen.)
    """
    trained = r"adapters_\d+/|length_table$" + (r"|mlm_head/" if mlm_head else "")
    return re.match(trained, path) is not None
