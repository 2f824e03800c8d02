"""ABNet's adapters: what is trained between the frozen layers (eq. 12, 13; Fig. 5).

The paper says between "each sub-layer"; its equations and ABNet's code have one adapter
after each whole layer, that is, after the layer norm of its feed-forward part.

What an adapter adds to its residual begins as Xavier times `output_scale`. ABNet's code
has 1. A frozen layer was trained on what the frozen layer before it says, and should
hear that at first; but with 0 the decoder would not read the source at all, and the
first gradient that crosses the line would be exactly zero. Our choice is 0.1. With it,
and layer norms as `matched` makes them, the last hidden states of all-MiniLM-L6-v2 keep
a cosine of 0.9 with those they had without adapters; with 0.3 it is 0.6, with 1 it is
0.03: noise. (Measured on three sentences.)

B batch, L source length, Q target length, D width (of the adapter's own side), H heads,
K head width, R inner width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from nebula_jax.models import transformer

XAVIER = nn.initializers.xavier_uniform()


def scaled_xavier(scale: float) -> nn.initializers.Initializer:
    """Xavier-uniform times `scale`."""
    if not scale:
        return nn.initializers.zeros
    return nn.initializers.variance_scaling(scale**2, "fan_avg", "uniform")


class EncoderAdapter(nn.Module):
    """A_ENC of eq. 12: y = x + W_up ReLU(W_down LN(x)), without biases."""

    config: transformer.Config
    """Of PLM-S."""
    inner: int
    """R; 512 in section 4.2."""
    output_scale: float

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """hidden [B, L, D] float32 -> [B, L, D] float32."""
        config = self.config
        dense = functools.partial(transformer.dense, config=config, use_bias=False)
        normal = transformer.layer_norm("layer_norm", config.layer_norm_epsilon)(hidden)
        inner = dense(self.inner, name="down", kernel_init=XAVIER)(normal)
        up = scaled_xavier(self.output_scale)
        return hidden + dense(config.width, name="up", kernel_init=up)(
            jax.nn.relu(inner)
        )


class DecoderAdapter(nn.Module):
    """A_DEC of eq. 13: x <- LN(x + MHA(x, H^E, H^E)), then x <- LN(x + FFN(x)).

    Both layer norms stand after a residual, as in the frozen blocks. So even where MHA
    and FFN say nothing, what a frozen layer said is changed: see `matched`.
    """

    config: transformer.Config
    """Of PLM-T. H^E may have another width."""
    inner: int
    """R of the FFN; ABNet's code has 512 for IWSLT."""
    heads: int
    """H of the cross attention; ABNet's code has 4 for IWSLT."""
    dropout: float
    """Of both sublayers' outputs; not of attention probabilities (ABNet's code)."""
    output_scale: float

    def setup(self):
        config = self.config
        dense = functools.partial(transformer.dense, config=config, name=None)
        split = (self.heads, config.width // self.heads)
        last = scaled_xavier(self.output_scale)
        self.query = dense(split, kernel_init=XAVIER)
        self.key = dense(split, kernel_init=XAVIER)
        self.value = dense(split, kernel_init=XAVIER)
        self.attention_output = dense(config.width, axis=(-2, -1), kernel_init=last)
        self.attention_layer_norm = transformer.layer_norm(
            None, config.layer_norm_epsilon
        )
        self.intermediate = dense(self.inner, kernel_init=XAVIER)
        self.output = dense(config.width, kernel_init=last)
        self.output_layer_norm = transformer.layer_norm(None, config.layer_norm_epsilon)
        self.drop = nn.Dropout(self.dropout)

    def read(self, source_hidden: jax.Array) -> transformer.KeyValues:
        """H^E [B, L, D of PLM-S] float32 -> K and V of eq. 13, [B, L, H, K] each."""
        return transformer.KeyValues(self.key(source_hidden), self.value(source_hidden))

    def __call__(
        self,
        hidden: jax.Array,
        source: transformer.KeyValues,
        source_mask: jax.Array,
        deterministic: bool,
    ) -> jax.Array:
        """Translates what it read into what the next frozen layer hears.

        Args:
          hidden: [B N, Q, D] float32; N hypotheses of a sentence follow each other.
          source: [B, L, H, K], what `read` returned.
          source_mask: [B, L] bool, false at padding.
          deterministic: no dropout.

        Returns:
          [B N, Q, D] float32.
        """
        drop = functools.partial(self.drop, deterministic=deterministic)
        # All hypotheses ask the one copy of the source, as one long target.
        together = hidden.reshape(source.key.shape[0], -1, hidden.shape[-1])
        context = transformer.attend(
            self.query(together), source, source_mask, self.config, lambda p: p
        )
        attended = self.attention_output(context).reshape(hidden.shape)
        hidden = self.attention_layer_norm(hidden + drop(attended))
        outer = self.output(jax.nn.relu(self.intermediate(hidden)))
        return self.output_layer_norm(hidden + drop(outer))


def matched(adapter: dict, said: jax.Array) -> dict:
    """A decoder adapter whose layer norms begin by changing as little as they can.

    A layer norm takes a token's mean and deviation away, which a frozen layer gave it
    and the next one expects. With the average ones as every unit's bias and scale, it
    puts them back, but for how much tokens differ.

    Args:
      adapter: parameters of a DecoderAdapter.
      said: [B, Q, D] float32, what the frozen layer before it says of some text.

    Returns:
      The adapter's parameters with new layer norms.
    """
    width = said.shape[-1]
    layer_norm = {
        "scale": jnp.full(width, jnp.std(said, axis=-1).mean()),
        "bias": jnp.full(width, jnp.mean(said)),
    }
    return adapter | {
        "attention_layer_norm": layer_norm,
        "output_layer_norm": layer_norm,
    }
