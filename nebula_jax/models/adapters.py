"""ABNet's adapters: the trained modules between frozen layers (eq. 12, 13; Fig. 5).

The paper has "each sub-layer"; its equations and ABNet's code have one adapter after
each whole layer, that is, after the layer norm of its feed-forward part.

Output kernels are initialized as Xavier times OUTPUT_SCALE, our choice; ABNet's code
has 1. Near zero each frozen layer at first receives the input it was trained on; with 0
the decoder would not read the source at all, and the first gradient sent back would be
zero. With `match_layer_norms` the last hidden states of all-MiniLM-L6-v2 keep a cosine
of 0.9 with those without adapters; with 0.3 it is 0.6, with 1 it is 0.03 (three
sentences).

B batch, L source length, Q target length, D width (of the adapter's own side), H heads,
K head width, R inner width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from nebula_jax.models import transformer

XAVIER = nn.initializers.xavier_uniform()
OUTPUT_SCALE = 0.1  # scale of the adapters' initial output


def scaled_xavier(scale: float) -> nn.initializers.Initializer:
    """Makes an initializer: Xavier-uniform times `scale`."""
    if not scale:
        return nn.initializers.zeros
    return nn.initializers.variance_scaling(scale**2, "fan_avg", "uniform")


class EncoderAdapter(nn.Module):
    """The adapter A_ENC of eq. 12: y = x + W_up ReLU(W_down LN(x)), without biases."""

    config: transformer.Config  # PLM-S
    inner: int  # R; 512 in section 4.2
    output_scale: float = OUTPUT_SCALE

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Adds the adapter's output: hidden [B, L, D] float32 -> [B, L, D] float32."""
        config = self.config
        dense = functools.partial(transformer.dense, config=config, use_bias=False)
        norm = transformer.layer_norm("layer_norm", config, use_bias=True)
        inner = dense(self.inner, name="down", kernel_init=XAVIER)(norm(hidden))
        up = scaled_xavier(self.output_scale)
        return hidden + dense(config.width, name="up", kernel_init=up)(
            jax.nn.relu(inner)
        )


class DecoderAdapter(nn.Module):
    """The adapter A_DEC of eq. 13.

    x <- LN(x + MHA(x, H^E, H^E)), then x <- LN(x + FFN(x)).

    Both layer norms stand after a residual, as in the frozen blocks. So even with MHA
    and FFN at zero the output of a frozen layer is changed: see `match_layer_norms`.
    """

    config: transformer.Config  # PLM-T. H^E may have another width
    inner: int  # R of the FFN; ABNet's code has 512 for IWSLT
    heads: int  # H of the cross attention; ABNet's code has 4 for IWSLT
    dropout: float  # of both sublayers' outputs, not of attention (ABNet's code)

    def setup(self) -> None:
        config = self.config
        dense = functools.partial(transformer.dense, config=config, name=None)
        split = (self.heads, config.width // self.heads)
        last = scaled_xavier(OUTPUT_SCALE)
        self.query = dense(split, kernel_init=XAVIER)
        self.key = dense(split, kernel_init=XAVIER)
        self.value = dense(split, kernel_init=XAVIER)
        self.attention_output = dense(config.width, axis=(-2, -1), kernel_init=last)
        self.attention_layer_norm = transformer.layer_norm(None, config)
        self.intermediate = dense(self.inner, kernel_init=XAVIER)
        self.output = dense(config.width, kernel_init=last)
        self.output_layer_norm = transformer.layer_norm(None, config)
        self.drop = nn.Dropout(self.dropout)

    def read(self, source_hidden: jax.Array) -> transformer.KeyValues:
        """Projects H^E [B, L, D of PLM-S] float32 to K and V, [B, L, H, K] each."""
        return transformer.KeyValues(self.key(source_hidden), self.value(source_hidden))

    def __call__(
        self,
        hidden: jax.Array,
        source: transformer.KeyValues,
        source_mask: jax.Array,
        deterministic: bool,
    ) -> jax.Array:
        """Attends to the source, then applies the FFN (eq. 13) to [B N, Q, D] float32.

        N hypotheses of a sentence follow each other. `source` [B, L, H, K] is what
        `read` returned; its mask [B, L] bool is false at padding.
        """
        drop = functools.partial(self.drop, deterministic=deterministic)
        # All hypotheses attend to one copy of the source, as one long target.
        together = hidden.reshape(source.key.shape[0], -1, hidden.shape[-1])
        context = transformer.attend(
            self.query(together), source, source_mask, self.config, lambda p: p
        )
        attended = self.attention_output(context).reshape(hidden.shape)
        hidden = self.attention_layer_norm(hidden + drop(attended))
        outer = self.output(jax.nn.relu(self.intermediate(hidden)))
        return self.output_layer_norm(hidden + drop(outer))


def match_layer_norms(
    adapter: dict[str, Any], activations: jax.Array
) -> dict[str, Any]:
    """Initializes a decoder adapter's layer norms so that they change little.

    A layer norm removes a token's mean and deviation, which the next frozen layer
    expects. With the average mean and deviation as every unit's bias and scale it
    restores them, up to the differences between tokens: of `activations` [B, Q, D]
    float32, the output of the frozen layer before it on some text.
    """
    width = activations.shape[-1]
    layer_norm = {
        "scale": jnp.full(width, jnp.std(activations, axis=-1).mean()),
        "bias": jnp.full(width, jnp.mean(activations)),
    }
    return adapter | {
        "attention_layer_norm": layer_norm,
        "output_layer_norm": layer_norm,
    }
