"""The general cut: a model in parts, trained as if it were one (sections 2.1, 2.2).

Any `front(params, batch, rng) -> h` and `back(params, h, batch, rng) -> loss` (or that
and a dict of metrics) become two halves, each jitted with its codecs inside. The front
sends h; the back returns the loss's gradient in h, with which the front finishes its
backward pass. The residuals of `jax.vjp` wait on the device meanwhile, so nothing is
computed twice. Between them any number of `middle(params, h, batch, rng) -> h2`.

    front_part = cut.front(front, forward_codec, backward_codec)
    middle_part = cut.front(middle, forward_codec, backward_codec, has_h=True)
    back_part = cut.back(back, forward_codec, backward_codec)

A part is functions: whoever trains holds its States, and saves them with the
parameters. A Selector's codecs are small programs beside the part's: the model is
compiled once, not once for each shape.

Parameters and h are any pytrees. The floating-point leaves of h get a gradient; others
(a mask, example numbers) come back with it as they are: codecs such as `pack_tokens`
read them.

Gradients of micro-batches are added, so a loss is to be divided by the batch's weight,
not by the micro-batch's.

With `has_aux=True` a part also updates something without a gradient, such as the
statistics of a BatchNorm: `fn` gets it after the parameters, and returns (what it
returns otherwise, the new one). The first one is given to `init_states`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import selector
from nebula_jax.communication.codecs import leaves
from nebula_jax.training import partition, residuals

Params = partition.Params
Batch = Any  # pytree of arrays
Rng = jax.Array | None  # a key; None if nothing is drawn with it


class PartError(errors.SettingsError, TypeError):
    """A part of a model that does not return what the cut needs of it."""


class CodecStates(NamedTuple):
    """The states of the codecs of what a part sends, and of what it receives."""

    sent: codec_lib.State
    received: codec_lib.State


NO_CODECS = CodecStates((), ())


class States(NamedTuple):
    """The states of a part, from one micro-batch to the next.

    before: of the codecs of the channels to the part before; NO_CODECS of a front.
    after: of those to the part after; NO_CODECS of a back.
    aux: of a part made with `has_aux`, a pytree of arrays.
    """

    before: CodecStates = NO_CODECS
    after: CodecStates = NO_CODECS
    aux: Any = None


@struct.dataclass
class Kept:
    """The arrays that wait for the gradient: the residuals, and h as it came."""

    residuals: residuals.Residuals
    received: codec_lib.Arrays


class Front(NamedTuple):
    """The front, or a middle part: any but the last.

    Gradients so far and states are changed in place: what was given cannot be used
    again.

    forward: (params, batch, rng, States, step, Selected payload of h, None of a front)
      -> (Selected payload of what it makes, Kept, the part's own loss, [] float32, 0 if
      it has none, States). The optimization step is for a Selector to choose by.
    backward: (params, batch, rng, Kept, Selected payload of the gradient that comes,
      States, gradients so far, step) -> (gradients with this micro-batch's added,
      States, Selected payload of the gradient in h, None of a front). The first three
      as `forward` got them.
    init_states: (spec of h, spec of what a middle part makes, aux=) -> States before
      the first step.
    zero_grads: (params) -> zeros for the first micro-batch to add to.
    """

    forward: Callable[..., tuple[selector.Selected, Kept, jax.Array, States]]
    backward: Callable[..., tuple[Params, States, selector.Selected | None]]
    init_states: Callable[..., States]
    zero_grads: Callable[[Params], Params]


class Back(NamedTuple):
    """The back half; gradients so far and states as in Front.

    step: (params, batch, rng, Selected payload of h, States, gradients so far, step) ->
      (Selected payload of the gradient in h, gradients with this micro-batch's added,
      metrics with the loss among them, States).
    init_states: (spec of h, aux=) -> States before the first step.
    zero_grads: as in Front.
    """

    step: Callable[..., tuple[selector.Selected, Params, Any, States]]
    init_states: Callable[..., States]
    zero_grads: Callable[[Params], Params]


def front(
    fn: Callable[..., Any],
    forward: selector.CodecOrSelector,
    backward: selector.CodecOrSelector,
    *,
    is_trained: partition.IsTrained = partition.train_all,
    has_loss: bool = False,
    has_aux: bool = False,
    has_h: bool = False,
) -> Front:
    """Makes the front of a model, or a middle part.

    Args:
      fn: (params, batch, rng) -> h; with `has_h`, (params, h, batch, rng) -> h2; with
        `has_loss`, -> (that, a loss of its own), which is added to the back's. With
        `has_aux`, (params, aux, ...) -> (what it returns otherwise, the new aux).
      forward: codec of h, and of h2.
      backward: codec of the gradients in them.
      is_trained: True for the paths of parameters that get a gradient.
      has_loss, has_aux, has_h: see `fn`.

    Raises:
      PartError: at its first use, if `fn` does not return that.
    """
    run = _front_fn(fn, has_loss, has_aux, has_h)

    def init_states(*specs: codec_lib.Spec, aux: Any = None) -> States:
        *h, made = specs
        before = init_codecs(backward, forward, *h) if has_h else NO_CODECS
        after = init_codecs(forward, backward, made)
        return States(before, after, _first_aux(aux, has_aux))

    return Front(
        _forward(run, forward, is_trained, has_h),
        _backward(backward, has_h),
        init_states,
        functools.partial(zero_grads, is_trained=is_trained),
    )


def _front_fn(
    fn: Callable[..., Any], has_loss: bool, has_aux: bool, has_h: bool
) -> Callable[..., Any]:
    """Returns what `jax.vjp` differentiates in its first argument.

    ((trained, activations of h), frozen, h, aux, batch, rng) -> ((activations of what
    it makes, own loss), (what it makes, new aux)).
    """
    run_fn = with_aux(fn, has_aux)

    def run(
        parts: Any, frozen: Params, h: Any, aux: Any, batch: Batch, rng: Rng
    ) -> Any:
        trained, activations = parts
        came = [leaves.with_floats(h, activations)] if has_h else []
        params = partition.merge(trained, frozen)
        out, aux = run_fn(params, aux, *came, batch, rng)
        made, loss = with_loss(out) if has_loss else (out, 0.0)
        return (activations_of(made), jnp.asarray(loss, jnp.float32)), (made, aux)

    return run


def _forward(
    run: Callable[..., Any],
    codec: selector.CodecOrSelector,
    is_trained: partition.IsTrained,
    has_h: bool,
) -> Callable[..., Any]:
    """Returns `Front.forward`; `run` is from `_front_fn`."""
    decode_before, decode = selector.staged_decoder(codec)
    encode, encode_after = selector.staged_encoder(codec)

    @functools.partial(jax.jit, donate_argnums=(4, 5))
    def run_forward(
        params: Params,
        batch: Batch,
        rng: Rng,
        payload: codec_lib.Payload,
        received_state: codec_lib.State,
        sent_state: codec_lib.State,
        aux: Any,
    ) -> Any:
        trained, frozen = partition.split(params, is_trained)
        h, activations = None, []
        if has_h:
            h, received_state = decode(payload, received_state)
            activations = activations_of(h)
        (_, loss), pullback, (made, aux) = jax.vjp(
            lambda parts: run(parts, frozen, h, aux, batch, rng),
            (trained, activations),
            has_aux=True,
        )
        sent, sent_state = encode(made, sent_state)
        # Without the arguments: those are there again when the gradient comes.
        kept = Kept(residuals.of(pullback, (params, batch, rng)), h)
        return sent, kept, loss, received_state, sent_state, aux

    def forward(
        params: Params,
        batch: Batch,
        rng: Rng,
        states: States,
        step: int,
        received: selector.Selected | None = None,
    ) -> tuple[selector.Selected, Kept, jax.Array, States]:
        before, after, aux = states
        payload, came = None, before.received
        if received is not None:
            payload, came = decode_before(received, came)
        sent, kept, loss, came, goes, aux = run_forward(
            params, batch, rng, payload, came, after.sent, aux
        )
        chosen, goes = encode_after(sent, goes, step)
        before, after = before._replace(received=came), after._replace(sent=goes)
        return chosen, kept, loss, States(before, after, aux)

    return forward


def _backward(codec: selector.CodecOrSelector, has_h: bool) -> Callable[..., Any]:
    """Returns `Front.backward`."""
    decode_before, decode = selector.staged_decoder(codec)
    encode, encode_after = selector.staged_encoder(codec)

    @functools.partial(jax.jit, donate_argnums=(5, 6, 7))
    def run_backward(
        params: Params,
        batch: Batch,
        rng: Rng,
        kept: Kept,
        payload: codec_lib.Payload,
        received_state: codec_lib.State,
        sent_state: codec_lib.State,
        grads: Params,
    ) -> Any:
        received, received_state = decode(payload, received_state)
        pullback = residuals.pullback(kept.residuals, (params, batch, rng))
        # The part's own loss is part of the whole loss, so its cotangent is 1.
        ((new, gradient),) = pullback((leaves.floats(received), jnp.ones(())))
        reply = None
        if has_h:
            gradient = leaves.with_floats(kept.received, gradient)
            reply, sent_state = encode(gradient, sent_state)
        return reply, received_state, sent_state, jax.tree.map(jnp.add, grads, new)

    def backward(
        params: Params,
        batch: Batch,
        rng: Rng,
        kept: Kept,
        selected: selector.Selected,
        states: States,
        grads: Params,
        step: int = 1,
    ) -> tuple[Params, States, selector.Selected | None]:
        before, after, aux = states
        payload, came = decode_before(selected, after.received)
        reply, came, goes, grads = run_backward(
            params, batch, rng, kept, payload, came, before.sent, grads
        )
        chosen = None
        if has_h:
            chosen, goes = encode_after(reply, goes, step)
        before, after = before._replace(sent=goes), after._replace(received=came)
        return grads, States(before, after, aux), chosen

    return backward


def back(
    fn: Callable[..., Any],
    forward: selector.CodecOrSelector,
    backward: selector.CodecOrSelector,
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
      forward, backward, is_trained, has_aux: as of `front`.
      sharding: where the activations of h go within this cluster; None leaves it to
        the compiler.

    Raises:
      PartError: at its first use, if `fn` does not return that.
    """

    def init_states(spec: codec_lib.Spec, aux: Any = None) -> States:
        before = init_codecs(backward, forward, spec)
        return States(before=before, aux=_first_aux(aux, has_aux))

    return Back(
        _step(_back_fn(fn, sharding, has_aux), forward, backward, is_trained),
        init_states,
        functools.partial(zero_grads, is_trained=is_trained),
    )


def _step(
    differentiated: Callable[..., Any],
    forward: selector.CodecOrSelector,
    backward: selector.CodecOrSelector,
    is_trained: partition.IsTrained,
) -> Callable[..., Any]:
    """Returns `Back.step`; `differentiated` is from `_back_fn`."""
    decode_before, decode = selector.staged_decoder(forward)
    encode, encode_after = selector.staged_encoder(backward)

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
    ) -> Any:
        parts = partition.split(params, is_trained)
        received, received_state = decode(payload, received_state)
        new, errors, metrics, aux = differentiated(parts, received, aux, batch, rng)
        reply, sent_state = encode(leaves.with_floats(received, errors), sent_state)
        grads = jax.tree.map(jnp.add, grads, new)
        return reply, sent_state, grads, metrics, received_state, aux

    def step(
        params: Params,
        batch: Batch,
        rng: Rng,
        selected: selector.Selected,
        states: States,
        grads: Params,
        number: int,
    ) -> tuple[selector.Selected, Params, Any, States]:
        payload, came = decode_before(selected, states.before.received)
        reply, goes, grads, metrics, came, aux = run_step(
            params, batch, rng, payload, came, states.before.sent, grads, states.aux
        )
        chosen, goes = encode_after(reply, goes, number)
        states = States(before=CodecStates(goes, came), aux=aux)
        return chosen, grads, metrics, states

    return step


def _back_fn(
    fn: Callable[..., Any], sharding: Any, has_aux: bool
) -> Callable[..., Any]:
    """Returns a function that differentiates the back half.

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
            loss, metrics = loss_and_metrics(out)
            return loss, ({"loss": loss, **metrics}, new_aux)

        differentiate = jax.grad(run, (0, 1), has_aux=True)
        (new, errors), (metrics, new_aux) = differentiate(trained, activations)
        return new, errors, metrics, new_aux

    return differentiated


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
                "with has_aux, a part returns (what it returns otherwise, aux), not"
                f" {_types(out)}"
            )
        if _types(out[1]) != _types(aux):
            raise PartError(
                f"auxiliary state goes in as {_types(aux)} and comes out as"
                f" {_types(out[1])}: the next micro-batch needs what this one got"
            )
        return out

    return checked


def _first_aux(aux: Any, has_aux: bool) -> Any:
    """Returns the auxiliary state that a part begins with."""
    if has_aux != (aux is not None):
        raise PartError(
            f"aux=: a part made with has_aux=True begins with one, others with none;"
            f" this one has has_aux={has_aux}"
        )
    return aux


def with_loss(out: Any) -> tuple[Any, Any]:
    """Returns (h, loss) of a part with `has_loss`; PartError if it returned another."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise PartError(
            f"with has_loss, a part returns (h, its own loss), not {_types(out)}"
        )
    return out


def loss_and_metrics(out: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the last part's loss and metrics; PartError if they are another thing."""
    if not isinstance(out, tuple):
        return out, {}
    if len(out) != 2 or not isinstance(out[1], Mapping):
        given = ", ".join(type(each).__name__ for each in out)
        raise PartError(
            "the last part returns the loss, or (loss, dict of metrics) as"
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


def init_codecs(
    send: selector.CodecOrSelector,
    receive: selector.CodecOrSelector,
    spec: codec_lib.Spec,
) -> CodecStates:
    """Makes two codecs' states; SettingsError if one does not give back the arrays."""
    for each in (send, receive):
        selector.fitted("h", each, spec)
    return CodecStates(send.init(spec), receive.init(spec))


def zero_grads(params: Params, is_trained: partition.IsTrained) -> Params:
    """Makes zeros like the trained parameters, for micro-batches to add to."""
    return jax.tree.map(jnp.zeros_like, partition.split(params, is_trained)[0])
