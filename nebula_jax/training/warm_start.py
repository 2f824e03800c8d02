"""A warm start: new heads on a pretrained encoder, which they must not spoil.

New heads begin at random. The quickest way down for their loss, to predict how frequent
each outcome is, leads through all of the encoder's hidden states at once, unless their
biases do so already; and the gradients that they send back before they have learned are
noise. So the heads train alone at first, their biases at the outcomes' frequencies, and
then lower layers more slowly than higher ones.

V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.training import optimizers, partition

SMOOTHING = 0.5  # counts that every outcome has before anything was seen
_WORDS = ("mlm_head", "clm_head")  # whose biases are of words
_REPLACED = "rtd_head/output/bias"


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of a warm start; the defaults train all parameters alike."""

    head_warmup_steps: int = 0  # steps in which heads train alone
    head_learning_rate: float = 0.0  # peak of the heads'; 0 for that of the encoder
    layer_decay: float = 1.0  # d of `optimizers.layer_factor`
    freeze_embeddings: bool = False  # True if no embedding trains
    head_priors: bool = False  # True: biases follow frequencies while heads train alone

    def __post_init__(self) -> None:
        """Raises ValueError, which begins with a field's name, at what cannot be."""
        if self.head_priors and not self.head_warmup_steps:
            raise ValueError(
                "head_priors counts in the steps in which heads train alone, and"
                " head_warmup_steps is 0"
            )


NONE = Config()  # the settings with which all parameters train alike


class Seen(NamedTuple):
    """The outcomes that a batch shows; None where a model has no such head."""

    words: jax.Array  # [V] float32, tokens of text of each piece
    replaced: jax.Array | None = None  # [2] float32, replaced tokens, and others


class State(NamedTuple):
    """The state of `optimizer`."""

    seen: Seen  # sums of the steps in which heads trained alone
    opened: jax.Array  # [] int32, steps after which the encoder trains
    heads: optax.OptState  # of their optimizer
    encoder: optax.OptState  # of its optimizer


def is_head(path: str) -> bool:
    """Returns True if a parameter is new: of no encoder and no embedding."""
    return not path.startswith(("embeddings/", "encoder/"))


def is_trained(config: Config, path: str) -> bool:
    """Returns True if a parameter ever trains."""
    return not (config.freeze_embeddings and path.startswith("embeddings/"))


def completed(init: Callable[[], Any], given: Any) -> Any:
    """Returns a model's parameters: the given ones that it has, and others drawn."""
    names = jax.eval_shape(init).keys()
    kept = {name: given[name] for name in sorted(names & given.keys())}
    rest = jax.jit(lambda: {n: part for n, part in init().items() if n not in kept})
    return jax.tree.map(jnp.asarray, kept) | rest()


def without_frozen(config: Config, params: Any) -> Any:
    """Returns the parameters; no gradient passes into those that never train."""
    if not config.freeze_embeddings:
        return params
    return params | {"embeddings": jax.lax.stop_gradient(params["embeddings"])}


def rate(
    step: jax.Array, begin: jax.Array | int, peak: float, warmup_steps: int, steps: int
) -> jax.Array:
    """Computes the rate, [] float32, of parameters that begin to train after others.

    It rises from 0 to `peak` over the warm-up, then falls linearly to 0 at the end:
    from step 0 on it is `optimizers.linear_decay`. Before `begin`, [] int32, it is 0.
    """
    now, first = jnp.float32(step), jnp.float32(begin)
    warmup = jnp.minimum(jnp.float32(warmup_steps), jnp.maximum(steps - first, 0))
    rise = jnp.where(warmup > 0, (now - first) / jnp.maximum(warmup, 1), now >= first)
    fall = (steps - now) / jnp.maximum(steps - first - warmup, 1)
    return peak * jnp.clip(jnp.minimum(rise, fall), 0, 1)


def optimizer(
    config: Config,
    inner: optax.GradientTransformation,
    *,
    peak: float,
    warmup_steps: int,
    steps: int,
    layers: int,
    clip_norm: float,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer under which heads begin, and the encoder follows.

    Its `update` has `step`, [] int32, and `seen`, the batch's `Seen`. `inner` makes the
    updates at a learning rate of 1, without clipping; a rate rises from when its
    parameters begin to train, to `peak` for the encoder's. The gradient of all that
    trains is clipped to `clip_norm`; 0 for no clipping.
    """

    clip = optimizers.clip(clip_norm)
    by_layer = optimizers.scale_by_layer(config.layer_decay, layers)

    def update(
        grads: Any, state: State, params: Any = None, *, step: jax.Array, seen: Seen
    ) -> tuple[Any, State]:
        heads, encoder = _parts(config, grads)
        own_heads, own_encoder = _parts(config, params)
        is_open = step >= state.opened
        encoder = jax.tree.map(lambda leaf: jnp.where(is_open, leaf, 0), encoder)
        (heads, encoder), _ = clip.update((heads, encoder), ())
        heads, of_heads = inner.update(heads, state.heads, own_heads)
        encoder, of_encoder = inner.update(encoder, state.encoder, own_encoder)
        # Until the encoder trains, its moments stay as they were at the beginning.
        of_encoder = jax.tree.map(
            lambda new, old: jnp.where(is_open, new, old), of_encoder, state.encoder
        )
        first_peak = config.head_learning_rate or peak
        at_heads = rate(step, 0, first_peak, warmup_steps, steps)
        at_encoder = rate(step, state.opened, peak, warmup_steps, steps)
        heads = jax.tree.map(lambda leaf: leaf * at_heads, heads)
        encoder = jax.tree.map(lambda leaf: leaf * at_encoder, encoder)
        encoder, _ = by_layer.update(encoder, optax.EmptyState())
        after = _after(config, state, step, seen)
        heads = _with_priors(config, heads, state.seen, after.seen)
        trained = partition.merge(heads, encoder)
        updates = partition.merge(trained, _zeros(config, grads))
        return updates, after._replace(heads=of_heads, encoder=of_encoder)

    init = functools.partial(_init, config, inner)
    return optax.GradientTransformationExtraArgs(init, update)


def _init(config: Config, inner: optax.GradientTransformation, params: Any) -> State:
    heads, encoder = _parts(config, params)
    bias = next(params[name]["bias"] for name in _WORDS if name in params)
    replaced = jnp.zeros(2) if "rtd_head" in params else None
    return State(
        Seen(jnp.zeros(bias.shape), replaced),
        jnp.array(config.head_warmup_steps, jnp.int32),
        inner.init(heads),
        inner.init(encoder),
    )


def words_seen(input_ids: jax.Array, vocab_size: int) -> jax.Array:
    """Counts the pieces of text, without padding and control pieces: [V] float32."""
    flat = jnp.ravel(input_ids)
    is_text = (flat >= vocabularies.NUM_SPECIAL).astype(jnp.float32)
    return jnp.zeros(vocab_size).at[flat].add(is_text)


def word_prior(words: jax.Array) -> jax.Array:
    """Returns the biases whose softmax is the share of each piece, [V] float32.

    A piece that was never seen counts as SMOOTHING of one; all are 0 if none was.
    """
    size = words.shape[0]
    share = (words + SMOOTHING) / (jnp.sum(words) + SMOOTHING * size)
    return jnp.log(share * size)


def original_prior(replaced: jax.Array) -> jax.Array:
    """Returns the log-odds that a token is original, [] float32; 0 if none was seen."""
    replaced, original = replaced + SMOOTHING
    return jnp.log(original / replaced)


def _parts(config: Config, tree: Any) -> tuple[Any, Any]:
    """Returns what trains of a tree like the parameters: heads, and the rest."""
    trained, _ = partition.split(tree, lambda path: is_trained(config, path))
    return partition.split(trained, is_head)


def _zeros(config: Config, grads: Any) -> Any:
    _, frozen = partition.split(grads, lambda path: is_trained(config, path))
    return jax.tree.map(jnp.zeros_like, frozen)


def _after(config: Config, state: State, step: jax.Array, seen: Seen) -> State:
    """Returns the state with what a batch has shown."""
    is_alone = step < config.head_warmup_steps
    before = state.seen
    words = before.words + jnp.where(is_alone, seen.words, 0)
    if before.replaced is None:
        return state._replace(seen=Seen(words))
    assert seen.replaced is not None
    replaced = before.replaced + jnp.where(is_alone, seen.replaced, 0)
    return state._replace(seen=Seen(words, replaced))


def _with_priors(config: Config, updates: Any, before: Seen, after: Seen) -> Any:
    """Adds to the heads' updates what their biases' priors have changed by."""
    if not config.head_priors:
        return updates
    change = word_prior(after.words) - word_prior(before.words)
    more = {f"{name}/bias": change for name in _WORDS}
    if before.replaced is not None and after.replaced is not None:
        odds = original_prior(after.replaced) - original_prior(before.replaced)
        more[_REPLACED] = odds[None]

    def added(path: str, leaf: jax.Array) -> jax.Array:
        return leaf + more[path] if path in more else leaf

    return partition.map_named(added, updates)
