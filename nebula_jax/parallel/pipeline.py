"""Micro-batches on both sides of a cut at once (section 3.3, Fig. 7).

The front sends one micro-batch after the other and does not wait for the first one's
gradient; the back answers each as it comes. Parameters change once a batch: the
gradients are those of the whole batch, added in the micro-batches' order, however they
overlapped. Between two batches the line is idle for a round trip.

Every function uses up the states of the half, and returns them: those of the codecs,
and with `has_aux` the auxiliary state, such as a BatchNorm's statistics.

B examples of a micro-batch. h: any pytree of arrays [B, ...]; losses: [] float32.
"""

import collections
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from nebula_jax.communication import channels
from nebula_jax.training import cut

Metrics = dict[str, jax.Array]
Tag = tuple[int, int]  # optimization step, from 1, and micro-batch, from 0


def micro_batch_key(rng: cut.Rng, step: int, number: int) -> cut.Rng:
    """Folds a step, from 1, and a micro-batch's number, from 0, into a key, if any."""
    if rng is None:
        return None
    return _fold(rng, jax.device_put(np.array([step, number], np.uint32)))


@jax.jit
def _fold(rng: jax.Array, tag: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(rng, tag[0]), tag[1])


class Ends(NamedTuple):
    """The ends that this side has of the two channels to a neighboring part.

    Of those to the part after, `hidden` is a Sender and `gradient` a Receiver; of those
    to the part before, the other way round.
    """

    hidden: Any
    gradient: Any


class _Sent(NamedTuple):
    """A micro-batch that waits for its gradient, with what that is to meet."""

    number: int
    batch: cut.Batch
    rng: cut.Rng
    kept: cut.Kept


def front_step(
    half: cut.Front,
    params: cut.Params,
    micro_batches: Iterable[cut.Batch],
    rng: cut.Rng,
    step: int,
    hidden: channels.Sender,
    gradient: channels.Receiver,
    states: cut.States,
    *,
    ahead: int,
    before: Ends | None = None,
    identity: Any = None,
) -> tuple[cut.Params, cut.States, jax.Array]:
    """Takes one batch through a part, each backward pass once it is possible.

    Args:
      micro_batches: of this batch, in order; each is requested when it is due.
      rng: the run's key, of which the part gets `micro_batch_key`; None for no keys.
      step: counted from 1; tag of the tensors, and an argument of a Selector's choice.
      hidden, gradient: channels of what this part makes, and of the gradient in it.
      states: of the part, with the codecs of its channels; used up.
      ahead: micro-batches that may be in flight, 1 or more: each keeps its residuals.
        The same in all parts, or two wait for each other.
      before: of a middle part, its channels to the part before.
      identity: of the batch, which the next part compares (`channels.identity_bytes`).

    Returns the batch's gradient, the part's states, and its own losses' sum, []
    float32. Raises session.RemoteProtocolError at another tensor than the one due, or
    another number of micro-batches, or another batch, from the part before.
    """
    grads, losses = half.zero_grads(params), []
    finish = functools.partial(_finish, half, params, step, gradient, before)
    waiting: collections.deque[_Sent] = collections.deque()
    for number, batch in enumerate(micro_batches):
        # Backward passes that are possible come first: they free their residuals.
        while waiting and (len(waiting) >= ahead or gradient.has_arrived):
            grads, states = finish(waiting.popleft(), states, grads)
        key = micro_batch_key(rng, step, number)
        kept, loss, states = _send_hidden(
            half, params, batch, key, (step, number), hidden, states, before
        )
        losses.append(loss)
        waiting.append(_Sent(number, batch, key, kept))
        del kept  # else its residuals would stay until the next ones are there
    hidden.end_step(step, len(losses), identity)
    while waiting:
        grads, states = finish(waiting.popleft(), states, grads)
    if before is not None:
        # Last: one that sends more waits for these gradients before it does.
        before.hidden.recv_end(step, len(losses), identity)
    return grads, states, _total(losses)


def _finish(
    half: cut.Front,
    params: cut.Params,
    step: int,
    gradient: channels.Receiver,
    before: Ends | None,
    sent: _Sent,
    states: cut.States,
    grads: cut.Params,
) -> tuple[cut.Params, cut.States]:
    """Waits for a micro-batch's gradient, and takes the backward pass."""
    selected = gradient.recv_payload(step, sent.number)
    with gradient.trace.span("compute", step=step, micro_batch=sent.number):
        grads, states, reply = gradient.trace.ready(
            half.backward(
                params, sent.batch, sent.rng, sent.kept, selected, states, grads, step
            )
        )
    if before is not None:
        before.gradient.send_payload(step, reply, sent.number)
    return grads, states


def back_step(
    half: cut.Back,
    params: cut.Params,
    micro_batches: Iterable[cut.Batch],
    rng: cut.Rng,
    step: int,
    hidden: channels.Receiver,
    gradient: channels.Sender,
    states: cut.States,
    *,
    identity: Any = None,
) -> tuple[cut.Params, cut.States, Metrics]:
    """Takes one batch through the back half, micro-batch by micro-batch as they come.

    Has the arguments of `front_step`. Returns the batch's gradient, the half's states,
    and the sum of the micro-batches' metrics, the loss among them. Raises
    session.RemoteProtocolError as `front_step`.
    """
    grads = half.zero_grads(params)
    metrics = []
    for number, batch in enumerate(micro_batches):
        key = micro_batch_key(rng, step, number)
        grads, states, measured = _answer(
            half, params, batch, key, (step, number), hidden, gradient, states, grads
        )
        metrics.append(measured)
    hidden.recv_end(step, len(metrics), identity)
    return grads, states, _sum(metrics)


def in_process_step(
    halves: tuple[cut.Front, cut.Back],
    params: tuple[cut.Params, cut.Params],
    micro_batches: Iterable[tuple[cut.Batch, cut.Batch]],
    rngs: tuple[cut.Rng, cut.Rng],
    step: int,
    hidden: tuple[channels.Sender, channels.Receiver],
    gradient: tuple[channels.Sender, channels.Receiver],
    states: tuple[cut.States, cut.States],
) -> tuple[
    tuple[cut.Params, cut.Params], tuple[cut.States, cut.States], jax.Array, Metrics
]:
    """Takes one batch through both halves in one process: the codecs without a line.

    Pairs are of the front and of the back, or both ends of a `loopback.Loopback`
    channel. Returns the gradients and the states of both, the front's own loss, the
    back's metrics.
    """
    front, back = halves
    front_grads, back_grads = front.zero_grads(params[0]), back.zero_grads(params[1])
    front_states, back_states = states
    losses, metrics = [], []
    for number, (front_batch, back_batch) in enumerate(micro_batches):
        tag = step, number
        front_key, back_key = (micro_batch_key(rng, step, number) for rng in rngs)
        kept, loss, front_states = _send_hidden(
            front, params[0], front_batch, front_key, tag, hidden[0], front_states
        )
        back_grads, back_states, measured = _answer(
            back,
            params[1],
            back_batch,
            back_key,
            tag,
            hidden[1],
            gradient[0],
            back_states,
            back_grads,
        )
        sent = _Sent(number, front_batch, front_key, kept)
        front_grads, front_states = _finish(
            front, params[0], step, gradient[1], None, sent, front_states, front_grads
        )
        losses.append(loss)
        metrics.append(measured)
    grads, states = (front_grads, back_grads), (front_states, back_states)
    return grads, states, _total(losses), _sum(metrics)


def _send_hidden(
    half: cut.Front,
    params: cut.Params,
    batch: cut.Batch,
    rng: cut.Rng,
    tag: Tag,
    hidden: channels.Sender,
    states: cut.States,
    before: Ends | None = None,
) -> tuple[cut.Kept, jax.Array, cut.States]:
    step, number = tag
    received = before and before.hidden.recv_payload(step, number)
    with hidden.trace.span("compute", step=step, micro_batch=number):
        selected, kept, loss, states = half.forward(
            params, batch, rng, states, step, received
        )
        hidden.trace.ready(selected.payload)
    hidden.send_payload(step, selected, number)
    return kept, loss, states


def _answer(
    half: cut.Back,
    params: cut.Params,
    batch: cut.Batch,
    rng: cut.Rng,
    tag: Tag,
    hidden: channels.Receiver,
    gradient: channels.Sender,
    states: cut.States,
    grads: cut.Params,
) -> tuple[cut.Params, cut.States, Metrics]:
    step, number = tag
    received = hidden.recv_payload(step, number)
    with hidden.trace.span("compute", step=step, micro_batch=number):
        reply, grads, metrics, states = half.step(
            params, batch, rng, received, states, grads, step
        )
        hidden.trace.ready((reply.payload, grads))
    gradient.send_payload(step, reply, number)
    return grads, states, metrics


def _total(losses: Sequence[jax.Array]) -> jax.Array:
    return cast(jax.Array, sum(losses))  # which is the int 0 of no losses alone


def _sum(metrics: Sequence[Metrics]) -> Metrics:
    return jax.tree.map(lambda *each: sum(each), *metrics)
