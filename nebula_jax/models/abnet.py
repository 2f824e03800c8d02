"""ABNet: two frozen language models that adapters join into a translator.

Section 3.2, Fig. 5; facts that the paper leaves open are from ABNet's code. `Source`
runs on cluster S, `Target` on cluster T, and neither receives the other's sentences:
`Encoded.hidden` is sent. Frozen parts have the names that their modules have elsewhere,
so that the parameters of a pretrained model fit in.

B batch, L source length, Q target length, D width (S's or T's own), V vocabulary of T,
N hypotheses of a sentence, P predictions, T lengths that can be predicted.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from nebula_jax.models import adapters, mask_slots, masked_lm, transformer

OBJECTIVES = ("cmlm", "ar")

Params = dict[str, Any]
Memory = tuple[transformer.KeyValues, ...]  # of S, [B, L, H, K] for each adapter of T


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a translator, the same on both sides."""

    source: transformer.Config  # PLM-S; dropout: of its frozen layers while training
    target: transformer.Config  # PLM-T; likewise
    objective: str = "cmlm"
    """`cmlm`: masked target, bidirectional, length predicted by S. `ar`: causal."""
    encoder_inner: int = 512  # inner width of an encoder adapter, section 4.2
    decoder_inner: int = 512  # of a decoder adapter's FFN, ABNet's code for IWSLT
    heads: int = 4  # heads of the cross attention, ABNet's code for IWSLT
    dropout: float = 0.1  # of decoder adapters, ABNet's code; encoder adapters: none
    max_target_length: int = 64  # of a row, [CLS] and [SEP] included, section 4.2
    bottleneck: int = 0  # columns that S sends, R; 0: H^E itself. Ours, not the paper's

    @property
    def sent_width(self) -> int:
        """The width of what S sends: D of PLM-S, or R."""
        return self.bottleneck or self.source.width


class Encoded(NamedTuple):
    """The output of S for a batch of sentences, float32.

    hidden: [B, L, D of PLM-S], H^E of eq. 12, 13; or [B, L, R], a bottleneck's of it.
    length_logits: [B, T], T = max_target_length + 1, for the number of tokens in the
      target row; -inf for 0. None with the objective `ar`.
    """

    hidden: jax.Array
    length_logits: jax.Array | None


class Source(nn.Module):
    """The source side: PLM-S, an adapter after each layer (eq. 12), the length head."""

    config: Config

    def setup(self) -> None:
        config = self.config
        self.embeddings = transformer.Embeddings(config.source)
        self.encoder = transformer.Encoder(config.source)
        self.adapters = [
            adapters.EncoderAdapter(config.source, config.encoder_inner)
            for _ in range(config.source.layers)
        ]
        if config.objective == "cmlm":
            self.length_table = self.param(
                "length_table",
                transformer.INITIALIZER,
                (config.max_target_length + 1, config.source.width),
            )
        if config.bottleneck:
            self.bottleneck = transformer.dense(config.bottleneck, config.source, None)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        deterministic: bool = True,
    ) -> Encoded:
        """Encodes source sentences [B, L] int32; the mask [B, L] is false at padding.

        Row 0 of the length table, which is no length's, embeds the length token:
        prepended after the embeddings, without a position or a layer norm, and removed
        after the last layer (ABNet's code).
        """
        hidden = self.embeddings(input_ids, deterministic)
        named = self.config.objective == "cmlm"
        if named:
            length = self.length_table[None, :1, :].repeat(hidden.shape[0], axis=0)
            hidden = jnp.concatenate([length, hidden], axis=1)
            attention_mask = jnp.pad(
                attention_mask, ((0, 0), (1, 0)), constant_values=True
            )
        hidden = self.encoder(
            hidden,
            attention_mask,
            deterministic,
            lambda layer, hidden: self.adapters[layer](hidden),
        )
        if not named:
            return Encoded(self._narrowed(hidden), None)
        logits = transformer.einsum(
            "bd,td->bt", hidden[:, 0], self.length_table, self.config.source
        )
        return Encoded(self._narrowed(hidden[:, 1:]), logits.at[:, 0].set(-jnp.inf))

    def _narrowed(self, hidden: jax.Array) -> jax.Array:
        return self.bottleneck(hidden) if self.config.bottleneck else hidden


class Target(nn.Module):
    """The target side: PLM-T with an adapter after each layer (eq. 13), its MLM head.

    Three ways in: `__call__` for training, `read` then `hidden` or `step` for decoding.
    """

    config: Config

    def setup(self) -> None:
        config = self.config
        self.embeddings = transformer.Embeddings(config.target)
        self.encoder = transformer.Encoder(config.target)
        self.mlm_head = masked_lm.MLMHead(config.target)
        self.adapters = [
            adapters.DecoderAdapter(
                config.target, config.decoder_inner, config.heads, config.dropout
            )
            for _ in range(config.target.layers)
        ]

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        source_hidden: jax.Array,
        source_mask: jax.Array,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Computes logits [P, V] float32 at `positions`, or everywhere [B, Q, V].

        Args:
          input_ids: [B, Q] int32.
          attention_mask: [B, Q] bool, false at padding.
          source_hidden: [B, L, D of PLM-S or R] float32, as S sends it.
          source_mask: [B, L] bool, false at padding.
          positions: [P] int32, places b Q + q in the batch laid out in one row; B Q in
            empty slots, whose logits are arbitrary. None: everywhere.
        """
        hidden = self.hidden(
            input_ids,
            attention_mask,
            self.read(source_hidden),
            source_mask,
            deterministic,
        )
        if positions is None:
            return self.mlm_head(hidden, self.embeddings.table)
        return self.logits(mask_slots.gather_positions(hidden, positions))

    def read(self, source_hidden: jax.Array) -> Memory:
        """Projects what S sends to the keys and values of every adapter."""
        return tuple(adapter.read(source_hidden) for adapter in self.adapters)

    def hidden(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        memory: Memory,
        source_mask: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Computes H^D of the last layer, [B N, Q, D] float32, of ids [B N, Q] int32.

        Hypotheses of a sentence follow each other. Both masks, [B N, Q] and [B, L]
        bool, are false at padding; `memory` is what `read` returned.
        """
        if self.config.objective == "ar":
            causal = transformer.causal_mask(input_ids.shape[-1])
            attention_mask = attention_mask[:, None, :] & causal
        return self.encoder(
            self.embeddings(input_ids, deterministic),
            attention_mask,
            deterministic,
            self._after_layer(memory, source_mask, deterministic),
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Computes logits of H^D at P places: [P, D] float32 -> [P, V] float32."""
        return self.mlm_head(hidden[None], self.embeddings.table)[0]

    def step(
        self,
        input_ids: jax.Array,
        position: jax.Array,
        cache: tuple[transformer.KeyValues, ...],
        memory: Memory,
        source_mask: jax.Array,
    ) -> tuple[jax.Array, tuple[transformer.KeyValues, ...]]:
        """Decodes one more token of every hypothesis, as `__call__` on all so far.

        Of the tokens [B N] int32 at `position`, [] int32, returns the logits [B N, V]
        float32 of the token after it, and the next cache; the first one is
        transformer.empty_cache(target, B N, longest). `source_mask` is [B, L] bool.
        """
        so_far = jnp.arange(cache[0].key.shape[1])[None, :] <= position
        hidden, cache = self.encoder(
            self.embeddings(input_ids[:, None], True, first_position=position),
            so_far,
            True,
            self._after_layer(memory, source_mask, True),
            cache,
            position,
        )
        return self.logits(hidden[:, 0]), cache

    def _after_layer(
        self, memory: Memory, source_mask: jax.Array, deterministic: bool
    ) -> Callable[[int, jax.Array], jax.Array]:
        return lambda layer, hidden: self.adapters[layer](
            hidden, memory[layer], source_mask, deterministic
        )


def encode(
    config: Config,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    keys: jax.Array | None = None,
) -> Encoded:
    """Applies `Source` to its arguments, with dropout drawn per example.

    An example's dropout depends on its key and the length of its row, not on the other
    examples, so that micro-batches add up to the batch, and H^E differs little between
    epochs. `keys` are [B], one for each example; None for no dropout.
    """
    source = Source(config)
    if keys is None:
        return source.apply({"params": params}, input_ids, attention_mask)

    def one(key: jax.Array, ids: jax.Array, mask: jax.Array) -> Encoded:
        encoded = source.apply(
            {"params": params}, ids[None], mask[None], False, rngs={"dropout": key}
        )
        return jax.tree.map(lambda leaf: leaf[0], encoded)

    return jax.vmap(one)(keys, input_ids, attention_mask)


def decode(
    config: Config,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    source_hidden: jax.Array,
    source_mask: jax.Array,
    positions: jax.Array,
    keys: jax.Array | None = None,
) -> jax.Array:
    """Applies `Target` to its arguments: logits [P, V] float32 at `positions`.

    Dropout is drawn per example from `keys`, [B]; None for no dropout.
    """
    target = Target(config)
    rows = (input_ids, attention_mask, source_hidden, source_mask)
    if keys is None:
        return target.apply({"params": params}, *rows, positions)

    def one(key: jax.Array, *row: jax.Array) -> jax.Array:
        ids, mask, source_hidden, source_mask = (each[None] for each in row)

        def hidden(module: Target) -> jax.Array:
            memory = module.read(source_hidden)
            return module.hidden(ids, mask, memory, source_mask, False)

        apply = nn.apply(hidden, target)
        return apply({"params": params}, rngs={"dropout": key})[0]

    hidden = jax.vmap(one)(keys, *rows)
    return target.apply(
        {"params": params},
        mask_slots.gather_positions(hidden, positions),
        method="logits",
    )
