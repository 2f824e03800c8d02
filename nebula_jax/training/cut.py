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

`has_aux=True` is for what a half updates without a gradient, such as the statistics of
a BatchNorm: `fn` gets it after the parameters, and returns (what it returns otherwise,
the new one). Whoever trains holds it beside the codecs' states, in WithAux:

    def front(params, stats, images, rng):
        variables = {"params": params, "batch_stats": stats}
        hidden, new = Stem().apply(variables, images, mutable=["batch_stats"])
        return hidden, new["batch_stats"]

    front_half = cut.front(front, forward_codec, backward_codec, has_aux=True)
    states = cut.WithAux(front_half.init_codecs(spec), stats)

`bottleneck` is a learned pair around the line, for h of which fewer columns cross.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import selector
from nebula_jax.communication.codecs import leaves
from nebula_jax.models import bottleneck as bottlenecks
from nebula_jax.training import partition, residuals

Params = partition.Params
Batch = Any  # pytree of arrays
Rng = jax.Array | None  # a key; None if nothing is drawn with it


class PartError(errors.SettingsError, TypeError):
    """A part of a model that does not return what the cut needs of it."""


class CodecStates(NamedTuple):
    """The states of a half's two codecs, for one pair of channels.

    sent: of the codec of what this half sends.
    received: of the codec of what it receives.
    """

    sent: codec_lib.State
    received: codec_lib.State


class WithAux(NamedTuple):
    """The states of a half made with `has_aux`.

    codecs: the states of its codecs.
    aux: the auxiliary state, a pytree of arrays; each micro-batch gets what the one
      before it returned.
    """

    codecs: CodecStates
    aux: Any


States = CodecStates | WithAux
Forward = Callable[
    [Params, Batch, Rng, States, int],
    tuple[selector.Selected, residuals.Residuals, jax.Array, States],
]
Backward = Callable[
    [Params, Batch, Rng, residuals.Residuals, selector.Selected, States, Params],
    tuple[Params, States],
]
Step = Callable[
    [Params, Batch, Rng, selector.Selected, States, Params, int],
    tuple[selector.Selected, Params, Any, States],
]

bottleneck = bottlenecks.pair


class Front(NamedTuple):
    """The front half.

    Gradients so far and codec states are changed in place: what was given cannot be
    used again.

    forward: (params, batch, rng, States, step) -> (Selected payload of h, Residuals,
      the half's own loss, [] float32, 0 if it has none, States). The optimization step
      is for a Selector to choose by.
    backward: (params, batch, rng, Residuals, Selected payload of the gradient in h,
      States, gradients so far) -> (gradients with this micro-batch's added, States).
      The first three as `forward` got them.
    spec: (params, batch, rng, aux if it has any) -> the ShapeDtypeStructs of h, for
      channels.
    init_codecs: (spec of h) -> CodecStates before the first step.
    zero_grads: (params) -> zeros for the first micro-batch to add to.
    """

    forward: Forward
    backward: Backward
    spec: Callable[..., codec_lib.Spec]
    init_codecs: Callable[[codec_lib.Spec], CodecStates]
    zero_grads: Callable[[Params], Params]


class Back(NamedTuple):
    """The back half; gradients so far and codec states as in Front.

    step: (params, batch, rng, Selected payload of h, States, gradients so far, step) ->
      (Selected payload of the gradient in h, gradients with this micro-batch's added,
      metrics with the loss among them, States).
    init_codecs: as in Front.
    zero_grads: as in Front.
    """

    step: Step
    init_codecs: Callable[[codec_lib.Spec], CodecStates]
    zero_grads: Callable[[Params], Params]


def front(
    fn: Callable[..., Any],
    send: selector.CodecOrSelector,
    receive: selector.CodecOrSelector,
    *,
    is_trained: partition.IsTrained = partition.train_all,
    has_loss: bool = False,
    has_aux: bool = False,
) -> Front:
    """Makes the front half of a model.

    Args:
      fn: (params, batch, rng) -> h; with `has_loss`, -> (h, a loss of its own), which
        is added to the back's. With `has_aux`, (params, aux, batch, rng) -> (what it
        returns otherwise, the new aux).
      send: codec of h.
      receive: codec of the gradient in h.
      is_trained: True for the paths of parameters that get a gradient.
      has_loss, has_aux: see `fn`.

    Returns:
      Front.

    Raises:
      PartError: at its first use, if `fn` does not return that.
    """
    run = _front_fn(fn, has_loss, has_aux)

    def spec(params: Params, batch: Batch, rng: Rng, aux: Any = None) -> codec_lib.Spec:
        parts = partition.split(params, is_trained)
        _, (hidden, _) = jax.eval_shape(run, *parts, aux, batch, rng)
        return hidden

    return Front(
        _forward(run, send, is_trained, has_aux),
        _backward(receive, has_aux),
        spec,
        functools.partial(init_codecs, send, receive),
        functools.partial(zero_grads, is_trained=is_trained),
    )


def _front_fn(
    fn: Callable[..., Any], has_loss: bool, has_aux: bool
) -> Callable[..., Any]:
    """Returns what `jax.vjp` differentiates in its first argument, the trained ones.

    Returns:
      (trained, frozen, aux, batch, rng) -> ((activations, own loss), (h, new aux)).
    """
    run_fn = with_aux(fn, has_aux)

    def run(trained: Params, frozen: Params, aux: Any, batch: Batch, rng: Rng) -> Any:
        out, aux = run_fn(partition.merge(trained, frozen), aux, batch, rng)
        hidden, loss = out if has_loss else (out, 0.0)
        return (activations_of(hidden), jnp.asarray(loss, jnp.float32)), (hidden, aux)

    return run


def _forward(
    run: Callable[..., Any],
    send: selector.CodecOrSelector,
    is_trained: partition.IsTrained,
    has_aux: bool,
) -> Forward:
    """Returns `Front.forward`; `run` is from `_front_fn`."""
    encode, encode_after = selector.staged_encoder(send)

    @functools.partial(jax.jit, donate_argnums=3)
    def run_forward(
        params: Params, batch: Batch, rng: Rng, state: codec_lib.State, aux: Any
    ) -> tuple[codec_lib.Payload, residuals.Residuals, jax.Array, codec_lib.State, Any]:
        trained, frozen = partition.split(params, is_trained)
        (_, loss), pullback, (hidden, aux) = jax.vjp(
            lambda trained: run(trained, frozen, aux, batch, rng), trained, has_aux=True
        )
        payload, state = encode(hidden, state)
        # Without the arguments: those are there again when the gradient comes.
        return payload, residuals.of(pullback, (params, batch, rng)), loss, state, aux

    def forward(
        params: Params, batch: Batch, rng: Rng, states: States, step: int
    ) -> tuple[selector.Selected, residuals.Residuals, jax.Array, States]:
        codecs, aux = apart(states, has_aux)
        payload, kept, loss, sent, aux = run_forward(
            params, batch, rng, codecs.sent, aux
        )
        selected, sent = encode_after(payload, sent, step)
        codecs = codecs._replace(sent=sent)
        return selected, kept, loss, together(codecs, aux, has_aux)

    return forward


def _backward(receive: selector.CodecOrSelector, has_aux: bool) -> Backward:
    """Returns `Front.backward`."""
    decode_before, decode = selector.staged_decoder(receive)

    @functools.partial(jax.jit, donate_argnums=(5, 6))
    def run_backward(
        params: Params,
        batch: Batch,
        rng: Rng,
        kept: residuals.Residuals,
        payload: codec_lib.Payload,
        state: codec_lib.State,
        grads: Params,
    ) -> tuple[Params, codec_lib.State]:
        received, state = decode(payload, state)
        pullback = residuals.pullback(kept, (params, batch, rng))
        # The half's own loss is part of the whole loss, so its cotangent is 1.
        (new,) = pullback((leaves.floats(received), jnp.ones(())))
        return jax.tree.map(jnp.add, grads, new), state

    def backward(
        params: Params,
        batch: Batch,
        rng: Rng,
        kept: residuals.Residuals,
        selected: selector.Selected,
        states: States,
        grads: Params,
    ) -> tuple[Params, States]:
        codecs, aux = apart(states, has_aux)
        payload, received = decode_before(selected, codecs.received)
        grads, received = run_backward(
            params, batch, rng, kept, payload, received, grads
        )
        return grads, together(codecs._replace(received=received), aux, has_aux)

    return backward


def back(
    fn: Callable[..., Any],
    receive: selector.CodecOrSelector,
    send: selector.CodecOrSelector,
    *,
    is_trained: partition.IsTrained = partition.train_all,
    sharding: Any = None,
    has_aux: bool = False,
) -> Back:
    """Makes the back half of a model.

    Args:
      fn: (params, h, batch, rng) -> the loss, a scalar, or (loss, dict of metrics).
        With `has_aux`, (params, aux, h, batch, rng) -> (what it returns otherwise, the
        new aux).
      receive: codec of h.
      send: codec of the gradient in h.
      is_trained: True for the paths of parameters that get a gradient.
      sharding: where the activations of h go within this cluster; None leaves it to
        the compiler.
      has_aux: see `fn`.

    Returns:
      Back.

    Raises:
      PartError: at its first use, if `fn` does not return that.
    """
    differentiated = _back_fn(fn, sharding, has_aux)
    decode_before, decode = selector.staged_decoder(receive)
    encode, encode_after = selector.staged_encoder(send)

    @functools.partial(jax.jit, donate_argnums=(4, 5, 6))
    def run_step(
        params: Params,
        batch: Batch,
        rng: Rng,
        payload: codec_lib.Payload,
        received_state: codec_lib.State,
        sent_state: codec_lib.State,
        grads: Params,
        aux: Any,
    ) -> tuple[codec_lib.Payload, codec_lib.State, Params, Any, codec_lib.State, Any]:
        parts = partition.split(params, is_trained)
        received, received_state = decode(payload, received_state)
        new, errors, metrics, aux = differentiated(parts, received, aux, batch, rng)
        reply, sent_state = encode(leaves.with_floats(received, errors), sent_state)
        grads = jax.tree.map(jnp.add, grads, new)
        return reply, sent_state, grads, metrics, received_state, aux

    return Back(
        _step(run_step, decode_before, encode_after, has_aux),
        functools.partial(init_codecs, send, receive),
        functools.partial(zero_grads, is_trained=is_trained),
    )


def _back_fn(
    fn: Callable[..., Any], sharding: Any, has_aux: bool
) -> Callable[..., Any]:
    """Returns a function that differentiates the back half.

    Returns:
      ((trained, frozen), h, aux, batch, rng) -> (gradient of the trained ones, that of
      the activations, metrics with the loss, new aux).
    """
    run_fn = with_aux(fn, has_aux)

    def differentiated(
        parts: Any, received: codec_lib.Arrays, aux: Any, batch: Batch, rng: Rng
    ) -> tuple[Params, list[jax.Array], Any, Any]:
        trained, frozen = parts
        activations = activations_of(received)
        if sharding is not None:
            activations = jax.lax.with_sharding_constraint(activations, sharding)

        def run(trained: Params, activations: list[jax.Array]) -> tuple[jax.Array, Any]:
            hidden = leaves.with_floats(received, activations)
            params = partition.merge(trained, frozen)
            out, new_aux = run_fn(params, aux, hidden, batch, rng)
            loss, metrics = _loss_and_metrics(out)
            return loss, ({"loss": loss, **metrics}, new_aux)

        differentiate = jax.grad(run, (0, 1), has_aux=True)
        (new, errors), (metrics, new_aux) = differentiate(trained, activations)
        return new, errors, metrics, new_aux

    return differentiated


def _step(
    run_step: Callable[..., Any],
    decode_before: Callable[..., Any],
    encode_after: Callable[..., Any],
    has_aux: bool,
) -> Step:
    """Returns `Back.step`: a compiled step between what a Selector does on the host."""

    def step(
        params: Params,
        batch: Batch,
        rng: Rng,
        selected: selector.Selected,
        states: States,
        grads: Params,
        number: int,
    ) -> tuple[selector.Selected, Params, Any, States]:
        codecs, aux = apart(states, has_aux)
        payload, received = decode_before(selected, codecs.received)
        reply, sent, grads, metrics, received, aux = run_step(
            params, batch, rng, payload, received, codecs.sent, grads, aux
        )
        selected, sent = encode_after(reply, sent, number)
        codecs = CodecStates(sent, received)
        return selected, grads, metrics, together(codecs, aux, has_aux)

    return step


def with_aux(fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Returns (params, aux, ...) -> (what fn returns otherwise, aux)."""

    def checked(params: Params, aux: Any, *rest: Any) -> tuple[Any, Any]:
        # A module of NNX writes to its Variables, which must be of this very trace.
        params, aux = jax.tree.map(lambda leaf: leaf, (params, aux))
        if not has_aux:
            return fn(params, *rest), aux
        out = fn(params, aux, *rest)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise PartError(
                "with has_aux, a half returns (what it returns otherwise, aux), not"
                f" {_types(out)}"
            )
        if _types(out[1]) != _types(aux):
            raise PartError(
                f"auxiliary state goes in as {_types(aux)} and comes out as"
                f" {_types(out[1])}: the next micro-batch needs what this one got"
            )
        return out

    return checked


def _loss_and_metrics(out: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns what the back half's function returned, with metrics if it had none."""
    if not isinstance(out, tuple):
        return out, {}
    if len(out) != 2 or not isinstance(out[1], Mapping):
        given = ", ".join(type(each).__name__ for each in out)
        raise PartError(
            "a back half returns the loss, or (loss, dict of metrics) as"
            f' loss, {{"accuracy": hits}}; not ({given})'
        )
    return out


def activations_of(hidden: Any) -> list[Any]:
    """Returns the leaves of h that get a gradient."""
    codec_lib.check_arrays("h", hidden)
    activations = leaves.floats(hidden)
    if not activations:
        raise PartError(
            "h has no floating-point array, so no gradient can come back:"
            f" {_types(hidden)}"
        )
    return activations


def _types(tree: Any) -> str:
    codec_lib.check_arrays("auxiliary state", tree)
    return str(jax.tree.map(lambda leaf: leaf.dtype.name + str(leaf.shape), tree))


def apart(states: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the codecs' states and the auxiliary one of a part."""
    if has_aux != isinstance(states, WithAux):
        raise PartError(
            "the states of a half made with has_aux are"
            " cut.WithAux(half.init_codecs(spec), aux); those of one made without are"
            f" half.init_codecs(spec). This one has has_aux={has_aux}"
        )
    return states if isinstance(states, WithAux) else (states, None)


def together(codecs: Any, aux: Any, has_aux: bool) -> Any:
    """Inverts `apart`."""
    return WithAux(codecs, aux) if has_aux else codecs


def init_codecs(
    send: selector.CodecOrSelector,
    receive: selector.CodecOrSelector,
    spec: codec_lib.Spec,
) -> CodecStates:
    """Makes the states of two codecs of the same arrays.

    Raises:
      errors.SettingsError: if one does not give back what it is given.
    """
    for each in (send, receive):
        selector.fitted("h", each, spec)
    return CodecStates(send.init(spec), receive.init(spec))


def zero_grads(
    params: Params, is_trained: partition.IsTrained = partition.train_all
) -> Params:
    """Makes zeros like the trained parameters, for micro-batches to add to."""
    return jax.tree.map(jnp.zeros_like, partition.split(params, is_trained)[0])
