"""The general cut: a model in two halves, trained as if it were one (section 2.2).

Any `front(params, batch, rng) -> h` and `back(params, h, batch, rng) -> loss` (or that
and a dict of metrics) become two halves, each jitted with its codecs inside. The front
sends h; the back computes the loss, its parameters' gradient, and the loss's gradient
in h, which it returns; the front finishes the backward pass. The residuals of `jax.vjp`
wait on the device between the front's two calls, so nothing is computed twice.

A Selector's codecs are small programs beside the half's: the model is compiled once,
not once for each shape or pair of shapes.

    front_half = cut.front(front, forward_codec, backward_codec)
    back_half = cut.back(back, forward_codec, backward_codec)

A half is functions: whoever trains holds the states of its codecs, CodecStates, one for
each channel pair, and saves them with the parameters.

Parameters are any pytree: those of Flax, an `nnx.State`, lists of tuples, an array.

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
from flax import struct

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import selector
from nebula_jax.communication.codecs import leaves
from nebula_jax.training import partition

Params = partition.Params
Batch = Any  # pytree of arrays


class CodecStates(NamedTuple):
    """The states of a half's two codecs, for one pair of channels.

    sent: of the codec of what this half sends.
    received: of the codec of what it receives.
    """

    sent: codec_lib.State
    received: codec_lib.State


@struct.dataclass
class Residuals:
    """The arrays that the front's backward pass needs of its forward pass.

    kept: arrays of the forward pass. A weight is among them only if what the model
      multiplies by is not the weight itself, but a cast of it, such as to bfloat16.
    given: places of residuals that are arguments of the forward pass as they are (most
      of them weights): they are given again instead of being copied. Static.
    structure: of the pullback that all of them make up. Static.
    """

    kept: list[jax.Array]
    given: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)
    structure: Any = struct.field(pytree_node=False)


class Front(NamedTuple):
    """The front half.

    Gradients so far and codec states are changed in place: what was given cannot be
    used again.

    forward: (params, batch, rng, CodecStates, step) -> (Selected payload of h,
      Residuals, the half's own loss, [] float32, 0 if it has none, CodecStates). The
      optimization step is for a Selector to choose by.
    backward: (params, batch, rng, Residuals, Selected payload of the gradient in h,
      CodecStates, gradients so far) -> (gradients with this micro-batch's added,
      CodecStates). The first three as `forward` got them.
    spec: (params, batch, rng) -> the ShapeDtypeStructs of h, for channels.
    init_codecs: (spec of h) -> CodecStates before the first step.
    zero_grads: (params) -> zeros for the first micro-batch to add to.
    """

    forward: Callable[
        [Params, Batch, jax.Array, CodecStates, int],
        tuple[selector.Selected, Residuals, jax.Array, CodecStates],
    ]
    backward: Callable[
        [Params, Batch, jax.Array, Residuals, selector.Selected, CodecStates, Params],
        tuple[Params, CodecStates],
    ]
    spec: Callable[[Params, Batch, jax.Array], codec_lib.Spec]
    init_codecs: Callable[[codec_lib.Spec], CodecStates]
    zero_grads: Callable[[Params], Params]


class Back(NamedTuple):
    """The back half; gradients so far and codec states as in Front.

    step: (params, batch, rng, Selected payload of h, CodecStates, gradients so far,
      step) -> (Selected payload of the gradient in h, gradients with this
      micro-batch's added, metrics, CodecStates).
    init_codecs: as in Front.
    zero_grads: as in Front.
    """

    step: Callable[
        [Params, Batch, jax.Array, selector.Selected, CodecStates, Params, int],
        tuple[selector.Selected, Params, Any, CodecStates],
    ]
    init_codecs: Callable[[codec_lib.Spec], CodecStates]
    zero_grads: Callable[[Params], Params]


def front(
    fn: Callable[[Params, Batch, jax.Array], Any],
    send: selector.CodecOrSelector,
    receive: selector.CodecOrSelector,
    *,
    is_trained: partition.IsTrained = partition.train_all,
    has_loss: bool = False,
) -> Front:
    """Makes the front half of a model.

    Args:
      fn: (params, batch, rng) -> h; with `has_loss`, -> (h, a loss of its own), which
        is added to the back's.
      send: codec of h.
      receive: codec of the gradient in h.
      is_trained: True for the paths of parameters that get a gradient.
      has_loss: see `fn`.

    Returns:
      Front.
    """

    def run(
        trained: Params, frozen: Params, batch: Batch, rng: jax.Array
    ) -> tuple[tuple[list[jax.Array], jax.Array], codec_lib.Arrays]:
        out = fn(partition.merge(trained, frozen), batch, rng)
        hidden, loss = out if has_loss else (out, 0.0)
        return (leaves.floats(hidden), jnp.asarray(loss, jnp.float32)), hidden

    encode, encode_after = _encoder(send)
    decode_before, decode = _decoder(receive)

    @functools.partial(jax.jit, donate_argnums=3)
    def run_forward(
        params: Params, batch: Batch, rng: jax.Array, state: codec_lib.State
    ) -> tuple[codec_lib.Payload, Residuals, jax.Array, codec_lib.State]:
        trained, frozen = partition.split(params, is_trained)
        (_, loss), pullback, hidden = jax.vjp(
            lambda trained: run(trained, frozen, batch, rng), trained, has_aux=True
        )
        payload, state = encode(hidden, state)
        return payload, _residuals(pullback, (params, batch, rng)), loss, state

    @functools.partial(jax.jit, donate_argnums=(5, 6))
    def run_backward(
        params: Params,
        batch: Batch,
        rng: jax.Array,
        residuals: Residuals,
        payload: codec_lib.Payload,
        state: codec_lib.State,
        grads: Params,
    ) -> tuple[Params, codec_lib.State]:
        received, state = decode(payload, state)
        pullback = _pullback(residuals, (params, batch, rng))
        (new,) = pullback((leaves.floats(received), jnp.ones(())))
        return jax.tree.map(jnp.add, grads, new), state

    def forward(
        params: Params, batch: Batch, rng: jax.Array, states: CodecStates, step: int
    ) -> tuple[selector.Selected, Residuals, jax.Array, CodecStates]:
        payload, residuals, loss, sent = run_forward(params, batch, rng, states.sent)
        selected, sent = encode_after(payload, sent, step)
        return selected, residuals, loss, states._replace(sent=sent)

    def backward(
        params: Params,
        batch: Batch,
        rng: jax.Array,
        residuals: Residuals,
        selected: selector.Selected,
        states: CodecStates,
        grads: Params,
    ) -> tuple[Params, CodecStates]:
        payload, received = decode_before(selected, states.received)
        grads, received = run_backward(
            params, batch, rng, residuals, payload, received, grads
        )
        return grads, states._replace(received=received)

    def spec(params: Params, batch: Batch, rng: jax.Array) -> codec_lib.Spec:
        return jax.eval_shape(run, *partition.split(params, is_trained), batch, rng)[1]

    return Front(
        forward,
        backward,
        spec,
        functools.partial(_init_codecs, send, receive),
        functools.partial(zero_grads, is_trained=is_trained),
    )


def back(
    fn: Callable[[Params, Any, Batch, jax.Array], Any],
    receive: selector.CodecOrSelector,
    send: selector.CodecOrSelector,
    *,
    is_trained: partition.IsTrained = partition.train_all,
    sharding: Any = None,
) -> Back:
    """Makes the back half of a model.

    Args:
      fn: (params, h, batch, rng) -> the loss, a scalar, or (loss, dict of metrics).
      receive: codec of h.
      send: codec of the gradient in h.
      is_trained: True for the paths of parameters that get a gradient.
      sharding: where the activations of h go within this cluster; None leaves it to
        the compiler.

    Returns:
      Back.
    """

    decode_before, decode = _decoder(receive)
    encode, encode_after = _encoder(send)

    @functools.partial(jax.jit, donate_argnums=(4, 5, 6))
    def run_step(
        params: Params,
        batch: Batch,
        rng: jax.Array,
        payload: codec_lib.Payload,
        received_state: codec_lib.State,
        sent_state: codec_lib.State,
        grads: Params,
    ) -> tuple[codec_lib.Payload, codec_lib.State, Params, Any, codec_lib.State]:
        trained, frozen = partition.split(params, is_trained)
        received, received_state = decode(payload, received_state)
        activations = leaves.floats(received)
        if sharding is not None:
            activations = jax.lax.with_sharding_constraint(activations, sharding)

        def run(trained: Params, activations: list[jax.Array]) -> tuple[jax.Array, Any]:
            hidden = leaves.with_floats(received, activations)
            out = fn(partition.merge(trained, frozen), hidden, batch, rng)
            return out if isinstance(out, tuple) else (out, {})

        differentiate = jax.grad(run, (0, 1), has_aux=True)
        (new, errors), metrics = differentiate(trained, activations)
        reply, sent_state = encode(leaves.with_floats(received, errors), sent_state)
        grads = jax.tree.map(jnp.add, grads, new)
        return reply, sent_state, grads, metrics, received_state

    def step(
        params: Params,
        batch: Batch,
        rng: jax.Array,
        selected: selector.Selected,
        states: CodecStates,
        grads: Params,
        number: int,
    ) -> tuple[selector.Selected, Params, Any, CodecStates]:
        payload, received = decode_before(selected, states.received)
        reply, sent, grads, metrics, received = run_step(
            params, batch, rng, payload, received, states.sent, grads
        )
        selected, sent = encode_after(reply, sent, number)
        return selected, grads, metrics, CodecStates(sent, received)

    return Back(
        step,
        functools.partial(_init_codecs, send, receive),
        functools.partial(zero_grads, is_trained=is_trained),
    )


def _init_codecs(
    send: selector.CodecOrSelector,
    receive: selector.CodecOrSelector,
    spec: codec_lib.Spec,
) -> CodecStates:
    return CodecStates(send.init(spec), receive.init(spec))


def _encoder(codec: selector.CodecOrSelector) -> tuple[Callable, Callable]:
    """Splits encoding in two: inside the half's program, and after it, on the host."""
    if isinstance(codec, codec_lib.Codec):
        return codec.encode, lambda payload, state, step: (
            selector.Selected(payload),
            state,
        )
    encoders = [jax.jit(each.encode, donate_argnums=1) for each in codec.codecs]

    def encode_after(
        arrays: codec_lib.Arrays, state: codec_lib.State, step: int
    ) -> tuple[selector.Selected, codec_lib.State]:
        option = codec.choose(arrays, state, step)
        payload, state = encoders[option](arrays, state)
        return selector.Selected(payload, option), state

    return codec_lib.identity().encode, encode_after


def _decoder(codec: selector.CodecOrSelector) -> tuple[Callable, Callable]:
    """Splits decoding in two: before the half's program, and inside it."""
    if isinstance(codec, codec_lib.Codec):
        return lambda selected, state: (selected.payload, state), codec.decode
    decoders = [jax.jit(each.decode, donate_argnums=1) for each in codec.codecs]

    def decode_before(
        selected: selector.Selected, state: codec_lib.State
    ) -> tuple[codec_lib.Arrays, codec_lib.State]:
        return decoders[selected.option](selected.payload, state)

    return decode_before, codec_lib.identity().decode


def zero_grads(
    params: Params, is_trained: partition.IsTrained = partition.train_all
) -> Params:
    """Makes zeros like the trained parameters, for micro-batches to add to."""
    return jax.tree.map(jnp.zeros_like, partition.split(params, is_trained)[0])


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
