"""The general cut: a model in two halves, trained as if it were one (section 2.2).

Any `front(params, batch, rng) -> h` and `back(params, h, batch, rng) -> loss` become
two halves, each jitted with its codecs inside. The front sends h; the back computes the
loss and its own gradient, and returns the loss's gradient in h; the front finishes the
backward pass. The residuals of `jax.vjp` wait on the device between the front's two
calls, so nothing is computed twice.

    near = cut.front(front, forward_codec, backward_codec)
    far = cut.back(back, forward_codec, backward_codec)

h is any pytree. Its floating-point leaves are activations and get a gradient; others (a
mask, example numbers) go along as they are, and come back with the gradient: codecs
such as `pack_tokens` and `delta` read them.

Gradients of micro-batches are added. For them to make the batch's gradient, a loss is
to be divided by the batch's weight, not by the micro-batch's.
"""

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

    kept: arrays of the forward pass.
    given: places of residuals that are arguments of the forward pass as they are (most
      of them weights): they are given again instead of being copied. Static.
    structure: of the pullback that all of them make up. Static.
    """

    kept: list[jax.Array]
    given: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)
    structure: Any = struct.field(pytree_node=False)


class Front(NamedTuple):
    """The near half.

    forward: (params, batch, rng, codec state) -> (Sent, Residuals, the half's own loss,
      [] float32, 0 if it has none).
    backward: (params, batch, rng, Residuals, payload, option, codec state, gradients so
      far) -> (gradients with this micro-batch's added, codec state). Takes the
      gradients so far for its own: they cannot be used again.
    spec: (params, batch, rng) -> the ShapeDtypeStructs of h, for channels.
    """

    forward: Callable[..., tuple[Sent, Residuals, jax.Array]]
    backward: Callable[..., tuple[Params, codec_lib.State]]
    spec: Callable[..., codec_lib.Spec]


class Back(NamedTuple):
    """The far half.

    step: (params, batch, rng, payload, option, codec state of what comes, codec state
      of what goes, gradients so far) -> (Sent, gradients with this micro-batch's added,
      metrics, codec state of what comes). Takes the gradients so far for its own.
    """

    step: Callable[..., tuple[Sent, Params, Any, codec_lib.State]]


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
        hidden, loss = out if has_loss else (out, jnp.zeros(()))
        return (leaves.floats(hidden), loss), hidden

    def outline(params, batch, rng):
        """h without its activations: XLA leaves out what only they need."""
        hidden = run(*split(params, is_trained), batch, rng)[1]
        return [leaf for leaf in jax.tree.leaves(hidden) if not leaves.is_float(leaf)]

    def forward_with(codec: codec_lib.Codec):
        def forward(params, batch, rng, state):
            trained, frozen = split(params, is_trained)
            (_, loss), pullback, hidden = jax.vjp(
                lambda trained: run(trained, frozen, batch, rng), trained, has_aux=True
            )
            payload, state = codec.encode(hidden, state)
            return payload, _residuals(pullback, (params, batch, rng)), loss, state

        return jax.jit(forward)

    def backward_with(codec: codec_lib.Codec):
        def backward(params, batch, rng, residuals, payload, state, grads):
            received, state = codec.decode(payload, state)
            pullback = _pullback(residuals, (params, batch, rng))
            (new,) = pullback((leaves.floats(received), jnp.ones(())))
            return jax.tree.map(jnp.add, grads, new), state

        return jax.jit(backward, donate_argnums=6)

    def spec(params, batch, rng):
        return jax.eval_shape(run, *split(params, is_trained), batch, rng)[1]

    outline = jax.jit(outline)
    forwards = [forward_with(option) for option in codec_lib.fixed(send)]
    backwards = [backward_with(option) for option in codec_lib.fixed(receive)]

    def forward(params, batch, rng, state):
        option = 0
        if send.choose is not None:
            shape = spec(params, batch, rng)
            known = _with_known(shape, outline(params, batch, rng))
            option = send.choose(known, state)
        payload, residuals, loss, state = forwards[option](params, batch, rng, state)
        return Sent(payload, option, state), residuals, loss

    def backward(params, batch, rng, residuals, payload, option, state, grads):
        return backwards[option](params, batch, rng, residuals, payload, state, grads)

    return Front(forward, backward, spec)


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
      fn: (params, h, batch, rng) -> (loss, metrics), a scalar and a dict.
      receive: codec of h.
      send: codec of the gradient in h.
      is_trained: which parameters get a gradient.
      sharding: where the activations of h go within this cluster; None leaves it to
        the compiler.

    Returns:
      Back.
    """

    def outline_with(codec: codec_lib.Codec):
        def outline(payload, state):
            received = codec.decode(payload, state)[0]
            floats = jax.tree.map(leaves.is_float, received)
            known = jax.tree.leaves(received), jax.tree.leaves(floats)
            return [leaf for leaf, is_float in zip(*known, strict=True) if not is_float]

        return jax.jit(outline)

    def step_with(codec: codec_lib.Codec, reply: codec_lib.Codec):
        def step(params, batch, rng, payload, received_state, sent_state, grads):
            trained, frozen = split(params, is_trained)
            received, received_state = codec.decode(payload, received_state)
            activations = leaves.floats(received)
            if sharding is not None:
                activations = jax.lax.with_sharding_constraint(activations, sharding)

            def run(trained, activations):
                hidden = leaves.with_floats(received, activations)
                return fn(merge(trained, frozen), hidden, batch, rng)

            differentiate = jax.grad(run, (0, 1), has_aux=True)
            (new, errors), metrics = differentiate(trained, activations)
            reply_tree = leaves.with_floats(received, errors)
            answer, sent_state = reply.encode(reply_tree, sent_state)
            grads = jax.tree.map(jnp.add, grads, new)
            return answer, sent_state, grads, metrics, received_state

        return jax.jit(step, donate_argnums=6)

    options, replies = codec_lib.fixed(receive), codec_lib.fixed(send)
    outlines = [outline_with(option) for option in options]
    steps = {
        (number, reply_number): step_with(option, reply)
        for number, option in enumerate(options)
        for reply_number, reply in enumerate(replies)
    }

    def step(params, batch, rng, payload, option, received_state, sent_state, grads):
        reply = 0
        if send.choose is not None:
            decode = options[option].decode
            shape = jax.eval_shape(decode, payload, received_state)[0]
            known = _with_known(shape, outlines[option](payload, received_state))
            reply = send.choose(known, sent_state)
        answer, sent_state, grads, metrics, received_state = steps[option, reply](
            params, batch, rng, payload, received_state, sent_state, grads
        )
        return Sent(answer, reply, sent_state), grads, metrics, received_state

    return Back(step)


def split(params: Params, is_trained: IsTrained) -> tuple[Params, Params]:
    """Parameters -> (trained, frozen): only the first get gradients and moments."""
    flat = traverse_util.flatten_dict(params, sep="/")
    trained = {path: leaf for path, leaf in flat.items() if is_trained(path)}
    frozen = {path: leaf for path, leaf in flat.items() if path not in trained}
    return (
        traverse_util.unflatten_dict(trained, sep="/"),
        traverse_util.unflatten_dict(frozen, sep="/"),
    )


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


def _with_known(spec: codec_lib.Spec, known: list[jax.Array]) -> Any:
    """`spec` with arrays in the place of its leaves that are no activations."""
    values = iter(known)
    return jax.tree.map(
        lambda leaf: leaf if leaves.is_float(leaf) else next(values), spec
    )
