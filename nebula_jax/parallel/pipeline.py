"""Micro-batches on both sides of a cut at once (section 3.3, Fig. 7).

The front sends one micro-batch after the other and does not wait for the first one's
gradient; the back answers each as it comes. So both clusters and both directions of the
line are busy together. Parameters change once a batch: the gradients are those of the
whole batch, added in the micro-batches' order, however they overlapped.
"""

import collections
from collections.abc import Iterable, Sequence

import jax

from nebula_jax.communication import channels
from nebula_jax.training import cut

Metrics = dict[str, jax.Array]


def front_step(
    half: cut.Front,
    params: cut.Params,
    micro_batches: Iterable[cut.Batch],
    rng: jax.Array,
    step: int,
    hidden: channels.Sender,
    gradient: channels.Receiver,
    *,
    ahead: int,
    grads: cut.Params | None = None,
) -> tuple[cut.Params, jax.Array]:
    """One batch through the near half: a forward, then what backwards are possible.

    Args:
      half: of the model.
      params: all of its parameters.
      micro_batches: of this batch, in order; each is asked for when it is due.
      rng: key of the step; all micro-batches get the same.
      step: counted from 1; tag of what crosses, and what codecs go by that begin later.
      hidden: where h goes.
      gradient: where the gradient in h comes from.
      ahead: micro-batches that may be under way, at least 1: each keeps its residuals.
      grads: to add to, and used up; zeros if not given.

    Returns:
      The batch's gradient, and the sum of the half's own losses, [] float32.
    """
    if ahead < 1:
        raise ValueError(f"ahead must be at least 1, not {ahead}")
    if grads is None:
        grads = half.no_gradients(params)
    waiting: collections.deque[tuple[int, cut.Batch, cut.Residuals]]
    waiting = collections.deque()
    losses = []

    def finish(grads: cut.Params) -> cut.Params:
        number, batch, residuals = waiting.popleft()
        args = (half, params, batch, rng, (step, number))
        return _take_gradient(*args, gradient, residuals, grads)

    for number, batch in enumerate(micro_batches):
        while len(waiting) >= ahead or (waiting and gradient.has_arrived):
            grads = finish(grads)
        residuals, loss = _send_hidden(half, params, batch, rng, (step, number), hidden)
        waiting.append((number, batch, residuals))
        del residuals  # so that they are freed once used: finish has the last of them
        losses.append(loss)
    while waiting:
        grads = finish(grads)
    return grads, sum(losses)


def back_step(
    half: cut.Back,
    params: cut.Params,
    micro_batches: Iterable[cut.Batch],
    rng: jax.Array,
    step: int,
    hidden: channels.Receiver,
    gradient: channels.Sender,
    *,
    grads: cut.Params | None = None,
) -> tuple[cut.Params, Metrics]:
    """One batch through the far half, micro-batch by micro-batch as they come.

    Args:
      half: of the model.
      params, micro_batches, rng, step, grads: as in `front_step`.
      hidden: where h comes from.
      gradient: where the gradient in h goes.

    Returns:
      The batch's gradient, and the sum of the micro-batches' metrics.
    """
    if grads is None:
        grads = half.no_gradients(params)
    metrics = []
    for number, batch in enumerate(micro_batches):
        tag = (step, number)
        grads, measured = _answer(
            half, params, batch, rng, tag, hidden, gradient, grads
        )
        metrics.append(measured)
    return grads, _sum(metrics)


def looped_step(
    halves: tuple[cut.Front, cut.Back],
    params: tuple[cut.Params, cut.Params],
    micro_batches: Iterable[tuple[cut.Batch, cut.Batch]],
    rngs: tuple[jax.Array, jax.Array],
    step: int,
    hidden: tuple[channels.Sender, channels.Receiver],
    gradient: tuple[channels.Sender, channels.Receiver],
    *,
    grads: tuple[cut.Params, cut.Params] | None = None,
) -> tuple[tuple[cut.Params, cut.Params], jax.Array, Metrics]:
    """Both halves in one process: what the codecs do, without a line.

    Args:
      halves, params, micro_batches, rngs, grads: of the front and of the back.
      step: as in `front_step`.
      hidden, gradient: both ends of each channel, of one `loopback.Loopback`.

    Returns:
      The gradients of both, the front's own loss, the back's metrics.
    """
    near, far = halves
    if grads is None:
        grads = near.no_gradients(params[0]), far.no_gradients(params[1])
    near_grads, far_grads = grads
    losses, metrics = [], []
    for number, (near_batch, far_batch) in enumerate(micro_batches):
        tag = (step, number)
        residuals, loss = _send_hidden(
            near, params[0], near_batch, rngs[0], tag, hidden[0]
        )
        far_grads, measured = _answer(
            far, params[1], far_batch, rngs[1], tag, hidden[1], gradient[0], far_grads
        )
        near_grads = _take_gradient(
            *(near, params[0], near_batch, rngs[0], tag),
            *(gradient[1], residuals, near_grads),
        )
        losses.append(loss)
        metrics.append(measured)
    return (near_grads, far_grads), sum(losses), _sum(metrics)


def _send_hidden(
    half: cut.Front,
    params: cut.Params,
    batch: cut.Batch,
    rng: jax.Array,
    tag: tuple[int, int],
    hidden: channels.Sender,
) -> tuple[cut.Residuals, jax.Array]:
    step, number = tag
    sent, residuals, loss = half.forward(params, batch, rng, hidden.state, step)
    hidden.state = sent.state
    hidden.send_payload(step, sent.payload, sent.option, number)
    return residuals, loss


def _answer(
    half: cut.Back,
    params: cut.Params,
    batch: cut.Batch,
    rng: jax.Array,
    tag: tuple[int, int],
    hidden: channels.Receiver,
    gradient: channels.Sender,
    grads: cut.Params,
) -> tuple[cut.Params, Metrics]:
    step, number = tag
    payload, option = hidden.recv_payload(step, number)
    sent, grads, metrics, hidden.state = half.step(
        *(params, batch, rng, payload, option),
        *(hidden.state, gradient.state, grads, step),
    )
    gradient.state = sent.state
    gradient.send_payload(step, sent.payload, sent.option, number)
    return grads, metrics


def _take_gradient(
    half: cut.Front,
    params: cut.Params,
    batch: cut.Batch,
    rng: jax.Array,
    tag: tuple[int, int],
    gradient: channels.Receiver,
    residuals: cut.Residuals,
    grads: cut.Params,
) -> cut.Params:
    payload, option = gradient.recv_payload(*tag)
    grads, gradient.state = half.backward(
        params, batch, rng, residuals, payload, option, gradient.state, grads
    )
    return grads


def _sum(metrics: Sequence[Metrics]) -> Metrics:
    return jax.tree.map(lambda *each: sum(each), *metrics)
