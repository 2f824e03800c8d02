"""The general cut: a model in two halves, trained as if it were one (section 2.2).

Any `front(params, batch, rng) -> h` and `back(params, h, batch, rng) -> loss` (or that
and a dict of metrics) become two halves, each jitted with its codecs inside. The front
sends h; the back computes the loss and its own gradient, and returns the loss's
gradient in h; the front finishes the backward pass. The residuals of `jax.vjp` wait on
the device between the front's two calls, so nothing is computed twice.

A codec that chooses among shapes is a small program beside the half's: the model is
compiled once, not once for each shape or pair of shapes.

    near = cut.front(front, forward_codec, backward_codec)
    far = cut.back(back, forward_codec, backward_codec)

h is any pytree. Its floating-point leaves are activations and get a gradient; others (a
mask, example numbers) go along as they are, and come back with the gradient: codecs
such as `pack_tokens` and `delta` read them.

Gradients of micro-batches are added. For them to make the batch's gradient, a loss is
to be divided by the batch's weight, not by the micro-batch's.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct, traverse_util

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.codecs import leaves

Params = Any  # nested dict of arrays
Batch = Any  # pytree of arrays
IsTrained = Callable[[str], bool]
"""Path of a parameter, as in `encoder/layer_0/output/kernel` -> whether it trains."""


class Sent(NamedTuple):
    """What a half gives to the line.

    payload: what the codec made.
    option: number of the codec's option that made it.
    state: the codec's, for the next time.
    """

    payload: codec_lib.Payload
    option: int
    state: codec_lib.State


@struct.dataclass
class Residuals:
    """What the front's backward pass needs of its forward pass.

    kept: arrays of the forward pass. A weight is among them only if what the model
      multiplies by is not the weight itself, but a cast of it to bfloat16, say.
    given: places of residuals that are arguments of the forward pass as they are (most
      of them weights): they are given again instead of being copied. Static.
    structure: of the pullback that all of them make up. Static.
    """

    kept: list[jax.Array]
    given: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)
    structure: Any = struct.field(pytree_node=False)


class Front(NamedTuple):
    """The near half.

    Gradients so far and codec states are changed in place: what was given cannot be
    used again.

    forward: (params, batch, rng, codec state, step) -> (Sent, Residuals, the half's own
      loss, [] float32, 0 if it has none). The optimisation step is for codecs that
      choose by it.
    backward: (params, batch, rng, Residuals, payload, option, codec state, gradients so
      far) -> (gradients with this micro-batch's added, codec state). The first three
      as `forward` got them.
    spec: (params, batch, rng) -> the ShapeDtypeStructs of h, for channels.
    no_gradients: (params) -> zeros for the first micro-batch to add to.
    """

    forward: Callable[..., tuple[Sent, Residuals, jax.Array]]
    backward: Callable[..., tuple[Params, codec_lib.State]]
    spec: Callable[..., codec_lib.Spec]
    no_gradients: Callable[[Params], Params]


class Back(NamedTuple):
    """The far half; gradients so far and codec states as in Front.

    step: (params, batch, rng, payload, option, codec state of what comes, codec state
      of what goes, gradients so far, step) -> (Sent, gradients with this micro-batch's
      added, metrics, codec state of what comes).
    no_gradients: as in Front.
    """

    step: Callable[..., tuple[Sent, Params, Any, codec_lib.State]]
    no_gradients: Callable[[Params], Params]


def everything(path: str) -> bool:
    """All parameters train."""
    return True


def front(
    fn: Callable[[Params, Batch, jax.Array], Any],
    send: codec_lib.Codec,
    receive: codec_lib.Codec,
    *,
    is_trained: IsTrained = everything,
    has_loss: bool = False,
) -> Front:
    """The near half of a model.

    Args:
      fn: (params, batch, rng) -> h; with `has_loss`, -> (h, a loss of its own), which
        is added to the far one's.
      send: codec of h.
      receive: codec of the gradient in h.
      is_trained: which parameters get a gradient.
      has_loss: see `fn`.

    Returns:
      Front.
    """

    def run(trained, frozen, batch, rng):
        out = fn(merge(trained, frozen), batch, rng)
        hidden, loss = out if has_loss else (out, 0.0)
        return (leaves.floats(hidden), jnp.asarray(loss, jnp.float32)), hidden

    encode, encode_after = _encoder(send)
    decode_before, decode = _decoder(receive)

    @functools.partial(jax.jit, donate_argnums=3)
    def run_forward(params, batch, rng, state):
        trained, frozen = split(params, is_trained)
        (_, loss), pullback, hidden = jax.vjp(
            lambda trained: run(trained, frozen, batch, rng), trained, has_aux=True
        )
        payload, state = encode(hidden, state)
        return payload, _residuals(pullback, (params, batch, rng)), loss, state

    @functools.partial(jax.jit, donate_argnums=(5, 6))
    def run_backward(params, batch, rng, residuals, payload, state, grads):
        received, state = decode(payload, state)
        pullback = _pullback(residuals, (params, batch, rng))
        (new,) = pullback((leaves.floats(received), jnp.ones(())))
        return jax.tree.map(jnp.add, grads, new), state

    def forward(params, batch, rng, state, step):
        payload, residuals, loss, state = run_forward(params, batch, rng, state)
        return encode_after(payload, state, step), residuals, loss

    def backward(params, batch, rng, residuals, payload, option, state, grads):
        payload, state = decode_before(payload, option, state)
        return run_backward(params, batch, rng, residuals, payload, state, grads)

    def spec(params, batch, rng):
        return jax.eval_shape(run, *split(params, is_trained), batch, rng)[1]

    return Front(forward, backward, spec, lambda own: no_gradients(own, is_trained))


def back(
    fn: Callable[[Params, Any, Batch, jax.Array], Any],
    receive: codec_lib.Codec,
    send: codec_lib.Codec,
    *,
    is_trained: IsTrained = everything,
    sharding: Any = None,
) -> Back:
    """The far half of a model.

    Args:
      fn: (params, h, batch, rng) -> the loss, a scalar, or (loss, dict of metrics).
      receive: codec of h.
      send: codec of the gradient in h.
      is_trained: which parameters get a gradient.
      sharding: where the activations of h go within this cluster; None leaves it to
        the compiler.

    Returns:
      Back.
    """

    decode_before, decode = _decoder(receive)
    encode, encode_after = _encoder(send)

    @functools.partial(jax.jit, donate_argnums=(4, 5, 6))
    def run_step(params, batch, rng, payload, received_state, sent_state, grads):
        trained, frozen = split(params, is_trained)
        received, received_state = decode(payload, received_state)
        activations = leaves.floats(received)
        if sharding is not None:
            activations = jax.lax.with_sharding_constraint(activations, sharding)

        def run(trained, activations):
            hidden = leaves.with_floats(received, activations)
            out = fn(merge(trained, frozen), hidden, batch, rng)
            return out if isinstance(out, tuple) else (out, {})

        differentiate = jax.grad(run, (0, 1), has_aux=True)
        (new, errors), metrics = differentiate(trained, activations)
        reply, sent_state = encode(leaves.with_floats(received, errors), sent_state)
        grads = jax.tree.map(jnp.add, grads, new)
        return reply, sent_state, grads, metrics, received_state

    def answer(
        params, batch, rng, payload, option, received_state, sent_state, grads, step
    ):
        payload, received_state = decode_before(payload, option, received_state)
        reply, sent_state, grads, metrics, received_state = run_step(
            params, batch, rng, payload, received_state, sent_state, grads
        )
        return encode_after(reply, sent_state, step), grads, metrics, received_state

    return Back(answer, lambda own: no_gradients(own, is_trained))


def _encoder(codec: codec_lib.Codec) -> tuple[Callable, Callable]:
    """What encodes inside the half's program, and what does after it, on the host."""
    if codec.choose is None:
        return codec.encode, lambda payload, state, step: Sent(payload, 0, state)
    options = [jax.jit(option.encode, donate_argnums=1) for option in codec.options]

    def encode_after(arrays, state, step):
        option = codec.choose(arrays, state, step)
        payload, state = options[option](arrays, state)
        return Sent(payload, option, state)

    return codec_lib.identity().encode, encode_after


def _decoder(codec: codec_lib.Codec) -> tuple[Callable, Callable]:
    """What decodes before the half's program, and what does inside it."""
    if codec.choose is None:
        return lambda payload, option, state: (payload, state), codec.decode
    options = [jax.jit(option.decode, donate_argnums=1) for option in codec.options]

    def decode_before(payload, option, state):
        return options[option](payload, state)

    return decode_before, codec_lib.identity().decode


def split(params: Params, is_trained: IsTrained) -> tuple[Params, Params]:
    """Parameters -> (trained, frozen): only the first get gradients and moments.

    Integers are frozen, whatever `is_trained` says.
    """
    flat = traverse_util.flatten_dict(params)
    trained = {
        path: leaf
        for path, leaf in flat.items()
        if leaves.is_float(leaf) and is_trained("/".join(path))
    }
    frozen = {path: leaf for path, leaf in flat.items() if path not in trained}
    return traverse_util.unflatten_dict(trained), traverse_util.unflatten_dict(frozen)


def merge(trained: Params, frozen: Params) -> Params:
    """The inverse of `split`: no parameter is in both."""
    flat = traverse_util.flatten_dict(trained) | traverse_util.flatten_dict(frozen)
    return traverse_util.unflatten_dict(flat)


def no_gradients(params: Params, is_trained: IsTrained = everything) -> Params:
    """Zeros like the trained parameters, for micro-batches to add to."""
    return jax.tree.map(jnp.zeros_like, split(params, is_trained)[0])


def _residuals(pullback: Any, arguments: Any) -> Residuals:
    values, structure = jax.tree.flatten(pullback)
    places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(arguments))}
    given = [(n, places[id(v)]) for n, v in enumerate(values) if id(v) in places]
    kept = [value for value in values if id(value) not in places]
    return Residuals(kept, tuple(given), structure)


def _pullback(residuals: Residuals, arguments: Any) -> Callable:
    again = jax.tree.leaves(arguments)
    given = {place: again[number] for place, number in residuals.given}
    kept = iter(residuals.kept)
    count = len(residuals.given) + len(residuals.kept)
    values = [given[n] if n in given else next(kept) for n in range(count)]
    return jax.tree.unflatten(residuals.structure, values)
