"""The middle part of a model that is cut in three or more (section 2.1).

    part = cut_middle.middle(fn, receive, reply, send, answer)

`fn(params, h, batch, rng) -> h2` is a front half for the part after it, and a back half
for the part before it: it differentiates in its parameters and in h. As in `cut`, each
of its two calls is one compiled program with the codecs inside, and the residuals wait
on the device in between.
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
from nebula_jax.training import cut, partition, residuals


class BothStates(NamedTuple):
    """The states of a middle part's codecs.

    before: of the channels to the part before: the gradient is sent, h received.
    after: of those to the part after: h2 is sent, its gradient received.
    """

    before: cut.CodecStates
    after: cut.CodecStates


States = BothStates | cut.WithAux


@struct.dataclass
class Kept:
    """The arrays that wait for the gradient: the residuals, and h as it came."""

    residuals: residuals.Residuals
    received: codec_lib.Arrays


class Middle(NamedTuple):
    """The middle part; gradients so far and states are used up, as in `cut.Front`.

    forward: (params, batch, rng, Selected payload of h, States, step) -> (Selected
      payload of h2, Kept, its own loss, [] float32, States).
    backward: (params, batch, rng, Kept, Selected payload of the gradient in h2, States,
      gradients so far, step) -> (Selected payload of the gradient in h, gradients with
      this micro-batch's added, States). The first three as `forward` got them.
    spec: (params, h, batch, rng, aux if it has any) -> the ShapeDtypeStructs of h2.
    init_codecs: (spec of h, spec of h2) -> BothStates before the first step.
    zero_grads: (params) -> zeros for the first micro-batch to add to.
    """

    forward: Callable[..., tuple[selector.Selected, Kept, jax.Array, States]]
    backward: Callable[..., tuple[selector.Selected, cut.Params, States]]
    spec: Callable[..., codec_lib.Spec]
    init_codecs: Callable[[codec_lib.Spec, codec_lib.Spec], BothStates]
    zero_grads: Callable[[cut.Params], cut.Params]


def middle(
    fn: Callable[..., Any],
    receive: selector.CodecOrSelector,
    reply: selector.CodecOrSelector,
    send: selector.CodecOrSelector,
    answer: selector.CodecOrSelector,
    *,
    is_trained: partition.IsTrained = partition.train_all,
    has_loss: bool = False,
    has_aux: bool = False,
) -> Middle:
    """Makes a middle part of a model.

    Args:
      fn: (params, h, batch, rng) -> h2; with `has_loss`, -> (h2, a loss of its own).
        With `has_aux`, (params, aux, h, batch, rng) -> (what it returns otherwise, the
        new aux).
      receive, reply: codecs of h, which comes, and of the gradient in it, which goes.
      send, answer: codecs of h2, which goes, and of the gradient in it, which comes.
      is_trained: True for the paths of parameters that get a gradient.
      has_loss, has_aux: see `fn`.

    Raises:
      cut.PartError: at its first use, if `fn` does not return that.
    """
    run = _middle_fn(fn, has_loss, has_aux)

    def spec(
        params: cut.Params,
        h: codec_lib.Spec,
        batch: cut.Batch,
        rng: cut.Rng,
        aux: Any = None,
    ) -> codec_lib.Spec:
        trained, frozen = partition.split(params, is_trained)

        def made(trained: Any, h: Any, batch: Any, rng: Any, aux: Any) -> Any:
            parts = trained, cut.activations_of(h)
            return run(parts, frozen, h, aux, batch, rng)[1][0]

        return jax.eval_shape(made, trained, h, batch, rng, aux)

    def init_codecs(h: codec_lib.Spec, h2: codec_lib.Spec) -> BothStates:
        return BothStates(
            cut.init_codecs(reply, receive, h),
            cut.init_codecs(send, answer, h2),
        )

    return Middle(
        _forward(run, receive, send, is_trained, has_aux),
        _backward(reply, answer, has_aux),
        spec,
        init_codecs,
        functools.partial(cut.zero_grads, is_trained=is_trained),
    )


def _middle_fn(
    fn: Callable[..., Any], has_loss: bool, has_aux: bool
) -> Callable[..., Any]:
    """Returns what `jax.vjp` differentiates in its first argument.

    Returns:
      ((trained, activations of h), frozen, h, aux, batch, rng) -> ((activations of h2,
      own loss), (h2, new aux)).
    """
    run_fn = cut.with_aux(fn, has_aux)

    def run(
        parts: Any, frozen: Any, h: Any, aux: Any, batch: cut.Batch, rng: cut.Rng
    ) -> Any:
        trained, activations = parts
        params, h = partition.merge(trained, frozen), leaves.with_floats(h, activations)
        out, aux = run_fn(params, aux, h, batch, rng)
        made, loss = out if has_loss else (out, 0.0)
        return (cut.activations_of(made), jnp.asarray(loss, jnp.float32)), (made, aux)

    return run


def _forward(
    run: Callable[..., Any],
    receive: selector.CodecOrSelector,
    send: selector.CodecOrSelector,
    is_trained: partition.IsTrained,
    has_aux: bool,
) -> Callable[..., Any]:
    """Returns `Middle.forward`; `run` is from `_middle_fn`."""
    decode_before, decode = selector.staged_decoder(receive)
    encode, encode_after = selector.staged_encoder(send)

    @functools.partial(jax.jit, donate_argnums=(4, 5))
    def run_forward(
        params: Any,
        batch: Any,
        rng: Any,
        payload: Any,
        received_state: Any,
        sent_state: Any,
        aux: Any,
    ) -> Any:
        trained, frozen = partition.split(params, is_trained)
        h, received_state = decode(payload, received_state)
        parts = trained, cut.activations_of(h)
        (_, loss), pullback, (made, aux) = jax.vjp(
            lambda parts: run(parts, frozen, h, aux, batch, rng), parts, has_aux=True
        )
        sent, sent_state = encode(made, sent_state)
        kept = Kept(residuals.of(pullback, (params, batch, rng)), h)
        return sent, kept, loss, received_state, sent_state, aux

    def forward(
        params: Any, batch: Any, rng: Any, selected: Any, states: States, step: int
    ) -> tuple[selector.Selected, Kept, jax.Array, States]:
        codecs, aux = cut.apart(states, has_aux)
        before, after = codecs
        payload, received = decode_before(selected, before.received)
        sent, kept, loss, received, own, aux = run_forward(
            params, batch, rng, payload, received, after.sent, aux
        )
        chosen, own = encode_after(sent, own, step)
        codecs = BothStates(
            before._replace(received=received), after._replace(sent=own)
        )
        return chosen, kept, loss, cut.together(codecs, aux, has_aux)

    return forward


def _backward(
    reply: selector.CodecOrSelector, answer: selector.CodecOrSelector, has_aux: bool
) -> Callable[..., Any]:
    """Returns `Middle.backward`."""
    decode_before, decode = selector.staged_decoder(answer)
    encode, encode_after = selector.staged_encoder(reply)

    @functools.partial(jax.jit, donate_argnums=(5, 6, 7))
    def run_backward(
        params: Any,
        batch: Any,
        rng: Any,
        kept: Kept,
        payload: Any,
        received_state: Any,
        sent_state: Any,
        grads: Any,
    ) -> Any:
        received, received_state = decode(payload, received_state)
        pullback = residuals.pullback(kept.residuals, (params, batch, rng))
        # The part's own loss is part of the whole loss, so its cotangent is 1.
        ((new, gradient),) = pullback((leaves.floats(received), jnp.ones(())))
        made = leaves.with_floats(kept.received, gradient)
        sent, sent_state = encode(made, sent_state)
        return sent, received_state, sent_state, jax.tree.map(jnp.add, grads, new)

    def backward(
        params: Any,
        batch: Any,
        rng: Any,
        kept: Kept,
        selected: selector.Selected,
        states: States,
        grads: Any,
        step: int,
    ) -> tuple[selector.Selected, Any, States]:
        codecs, aux = cut.apart(states, has_aux)
        before, after = codecs
        payload, received = decode_before(selected, after.received)
        sent, received, own, grads = run_backward(
            params, batch, rng, kept, payload, received, before.sent, grads
        )
        chosen, own = encode_after(sent, own, step)
        codecs = BothStates(
            before._replace(sent=own), after._replace(received=received)
        )
        return chosen, grads, cut.together(codecs, aux, has_aux)

    return backward
