"""Parameters of an ABNet: random, with pretrained models in them, which are trained.

B batch, L length, D width.
"""

import re

import jax
import jax.numpy as jnp

from nebula_jax.models import abnet, adapters, bottleneck, transformer

RANDOM_PIECES = (8, 16)  # B and L: enough for a mean over pieces and units


def init_source(config: abnet.Config, rng: jax.Array) -> abnet.Params:
    """Draws the parameters of a Source."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return abnet.Source(config).init(rng, ids, ids == 0)["params"]


def init_target(config: abnet.Config, rng: jax.Array) -> abnet.Params:
    """Draws the parameters of a Target."""
    ids = jnp.zeros((1, 1), jnp.int32)
    hidden = jnp.zeros((1, 1, config.sent_width))
    return abnet.Target(config).init(rng, ids, ids == 0, hidden, ids == 0)["params"]


def with_pretrained(
    config: abnet.Config, params: abnet.Params, pretrained: abnet.Params
) -> abnet.Params:
    """Puts a pretrained model into the parameters of a Source or Target.

    The model has `embeddings`, `encoder` and perhaps `mlm_head`; an `mlm_head` that
    only one of `params` and `pretrained` has is left as in `params`. Decoder adapters'
    layer norms are matched to the model's activations on random pieces
    (`adapters.match_layer_norms`): text is not needed, and would give nearly the same.
    """
    parts = [
        part
        for part in ("embeddings", "encoder", "mlm_head")
        if part in params and (part != "mlm_head" or part in pretrained)
    ]
    new = params | {part: pretrained[part] for part in parts}
    if "mlm_head" in params:  # a Target
        activations = _layers_of_random_pieces(config.target, new)
        for layer, hidden in enumerate(activations):
            name = f"adapters_{layer}"
            new[name] = adapters.match_layer_norms(params[name], hidden)
    return new


def narrowed_source(params: abnet.Params, beginning: bottleneck.Start) -> abnet.Params:
    """Returns a Source's parameters with a bottleneck, from those without."""
    return params | {"bottleneck": bottleneck.narrowing(beginning)}


def narrowed_target(params: abnet.Params, beginning: bottleneck.Start) -> abnet.Params:
    """Returns parameters of a Target that reads a bottleneck, from those of one of H^E.

    At rank D of PLM-S it computes the same; below, the same of the approximation.
    """

    def of_adapter(adapter: abnet.Params) -> abnet.Params:
        readers = {
            name: bottleneck.read_through(adapter[name], beginning)
            for name in ("key", "value")
        }
        return adapter | readers

    return {
        name: of_adapter(value) if name.startswith("adapters_") else value
        for name, value in params.items()
    }


def _layers_of_random_pieces(
    config: transformer.Config, pretrained: abnet.Params
) -> list[jax.Array]:
    """Computes each frozen layer's output without adapters, [B, L, D] float32 each."""
    length = min(RANDOM_PIECES[1], config.max_length)
    ids = jax.random.randint(
        jax.random.key(0), (RANDOM_PIECES[0], length), 0, config.vocab_size
    )

    @jax.jit
    def read(pretrained: abnet.Params) -> list[jax.Array]:
        outputs = []

        def record(layer: int, hidden: jax.Array) -> jax.Array:
            outputs.append(hidden)
            return hidden

        transformer.hidden_states(config, pretrained, ids, ids >= 0, record)
        return outputs

    return read({part: pretrained[part] for part in ("embeddings", "encoder")})


def is_trained(path: str, mlm_head: bool = False) -> bool:
    """Returns True if ABNet trains a parameter: those that no pretrained model has.

    These are the adapters, the length table and a bottleneck; with `mlm_head` also that
    head, for a checkpoint that had none. (The table it is tied to stays frozen.)
    """
    trained = r"adapters_\d+/|length_table$|bottleneck/"
    trained += r"|mlm_head/" if mlm_head else ""
    return re.match(trained, path) is not None
