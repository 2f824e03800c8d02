"""A model of your own, cut into parts that train as one over slow lines.

    half = nebula.cut.front(front, codec="int8(64)")   # front(params, batch, rng) -> h
    half = nebula.cut.middle(middle, codec=...)        # (params, h, batch, rng) -> h2
    half = nebula.cut.back(back, codec=...)            # (params, h, batch, rng) -> loss

    line = half.open(link, h)                          # channels, for h of this shape
    grads, line, metrics = half.step(params, micro_batches, key, step, line)

Any number of parts makes a chain: each dials the next, which listens. A batch is a list
of micro-batches, which are in flight together in all parts (GPipe). Its loss is the
mean of theirs, or with reduce="sum" their sum.

h is any pytree: its floating-point arrays get a gradient, others go along.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.models import bottleneck as bottlenecks
from nebula_jax.parallel import pipeline
from nebula_jax.training import cut, cut_middle, partition

Codec = str | selector.CodecOrSelector
"""A codec, or its name as in a flag: `int8(64)`; empty for none."""
Link = Any  # link.Link or worker_link.WorkerLink
Reduce = Literal["mean", "sum"]

bottleneck = bottlenecks.pair
_NORM = jax.ShapeDtypeStruct((), jnp.float32)


@struct.dataclass
class Line:
    """The channels of a part, and the states of their codecs.

    states: arrays, which `Run.restore` and `Run.done` save; of a part with `has_aux`
      `states.aux` is the newest of what it updates without a gradient.
    """

    states: Any
    before: Any = struct.field(pytree_node=False, default=None)
    after: Any = struct.field(pytree_node=False, default=None)
    norms: Any = struct.field(pytree_node=False, default=None)

    @property
    def aux(self) -> Any:
        """The newest of what a part made with `has_aux` updates without a gradient."""
        return self.states.aux


class _Norms:
    """The channels for the gradient's norm over all parts."""

    def __init__(self, before: Link | None, after: Link | None, most: float) -> None:
        none, up = codecs.identity(), f"norm so far, clipped at {most:g}"
        # Both sides open their channels in one order: up first.
        self.came = before and before.receiver(up, _NORM, none)
        self.total_to = before and before.sender("norm", _NORM, none)
        self.goes = after and after.sender(up, _NORM, none)
        self.total_from = after and after.receiver("norm", _NORM, none)

    def total(self, step: int, own: jax.Array) -> jax.Array:
        """Returns the squared norm of all parts' gradients, the same bits in each."""
        found = own
        if self.came is not None:
            found = self.came.recv(step) + own
        if self.goes is not None and self.total_from is not None:
            self.goes.send(step, found)
            found = self.total_from.recv(step)
        if self.total_to is not None:
            self.total_to.send(step, found)
        return found


@jax.jit
def _clipped(grads: Any, squared: jax.Array, most: jax.Array) -> Any:
    norm = jnp.sqrt(squared)
    scale = jnp.where(norm < most, 1.0, most / norm)
    return jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), grads)


class _Codecs(NamedTuple):
    """The codecs of a part's channels."""

    forward: selector.CodecOrSelector
    backward: selector.CodecOrSelector


class Part:
    """One part of a cut model; `front`, `middle` and `back` make it."""

    def __init__(
        self,
        half: Any,
        names: _Codecs,
        clip_norm: float,
        ahead: int | None,
        reduce: Reduce,
    ) -> None:
        if reduce not in ("mean", "sum"):
            raise errors.SettingsError(f"reduce={reduce}: expected mean or sum")
        self._half, self._codecs, self._clip_norm = half, names, clip_norm
        self._ahead = ahead
        # In the name, so that parts with other settings are refused as they meet.
        about = [f"{ahead} ahead"] * (ahead is not None) + ["sum"] * (reduce == "sum")
        self._name = ", ".join(["hidden", *about])

    def _to_after(self, link: Link, h: codec_lib.Spec) -> pipeline.Ends:
        forward, backward = self._codecs
        sender = link.sender(self._name, h, forward)
        return pipeline.Ends(sender, link.receiver("gradient", h, backward))

    def _to_before(self, link: Link, h: codec_lib.Spec) -> pipeline.Ends:
        forward, backward = self._codecs
        receiver = link.receiver(self._name, h, forward)
        return pipeline.Ends(receiver, link.sender("gradient", h, backward))

    def _line(self, codec_states: Any, aux: Any, links: Any, ends: Any) -> Line:
        states = codec_states if aux is None else cut.WithAux(codec_states, aux)
        before, after = links
        norms = _Norms(before, after, self._clip_norm) if self._clip_norm else None
        before, after = ends
        return Line(states=states, before=before, after=after, norms=norms)

    def _in_flight(self, micro_batches: Sequence[Any]) -> int:
        return self._ahead or len(micro_batches)

    def _finish(
        self, step: int, grads: Any, line: Line, states: Any
    ) -> tuple[Any, Line]:
        if line.norms is not None:
            own = jnp.square(optax.tree.norm(grads)).astype(jnp.float32)
            squared = line.norms.total(step, own)
            grads = _clipped(grads, squared, np.float32(self._clip_norm))
        return grads, dataclasses.replace(line, states=states)


class Front(Part):
    """The first part of a cut model."""

    def open(self, link: Link, h: codec_lib.Spec, aux: Any = None) -> Line:
        """Opens the channels to the next part.

        Args:
          link: to it, from `Run.dial`.
          h: ShapeDtypeStructs of a micro-batch's h, from `spec`; the same there.
          aux: what a part made with `has_aux` begins with.
        """
        ends = None, self._to_after(link, h)
        return self._line(self._half.init_codecs(h), aux, (None, link), ends)

    def step(
        self,
        params: Any,
        micro_batches: Sequence[Any],
        rng: Any,
        step: int,
        line: Line,
        identity: Any = None,
    ) -> tuple[Any, Line, dict[str, jax.Array]]:
        """Takes one batch through this part, forward and backward.

        Args:
          params: of this part.
          micro_batches: of this step's batch; as many in each part.
          rng: the run's key, of which each micro-batch gets one of its own; or None.
          step: counted from 1.
          line: used up: go on with the one that is returned.
          identity: what the batch is known by in all parts, such as the numbers of its
            examples: a part that has another batch than the one before ends the run.

        Returns:
          The batch's gradient, the line, and metrics: of the last part its loss and
          what it returned beside it, as means over the micro-batches or as sums; of the
          others nothing.
        """
        grads, states, _ = pipeline.front_step(
            self._half,
            params,
            _weighted(micro_batches),
            rng,
            step,
            line.after.hidden,
            line.after.gradient,
            line.states,
            ahead=self._in_flight(micro_batches),
            identity=identity,
        )
        return *self._finish(step, grads, line, states), {}


class Middle(Part):
    """A part of a cut model between two others."""

    def open(
        self,
        before: Link,
        after: Link,
        h: codec_lib.Spec,
        made: codec_lib.Spec,
        aux: Any = None,
    ) -> Line:
        """Opens the channels to both neighbors.

        Args:
          before: link to the part before, from `Run.listen`.
          after: link to the next part, from `Run.dial`.
          h: ShapeDtypeStructs of what comes; the same there.
          made: of what this part makes of it; the same there.
          aux: as in `Front.open`.
        """
        ends = self._to_before(before, h), self._to_after(after, made)
        codec_states = self._half.init_codecs(h, made)
        return self._line(codec_states, aux, (before, after), ends)

    def step(
        self,
        params: Any,
        micro_batches: Sequence[Any],
        rng: Any,
        step: int,
        line: Line,
        identity: Any = None,
    ) -> tuple[Any, Line, dict[str, jax.Array]]:
        """Takes one batch through this part; see `Front.step`."""
        grads, states, _ = pipeline.middle_step(
            self._half,
            params,
            _weighted(micro_batches),
            rng,
            step,
            line.before,
            line.after,
            line.states,
            ahead=self._in_flight(micro_batches),
            identity=identity,
        )
        return *self._finish(step, grads, line, states), {}


class Back(Part):
    """The last part of a cut model, which has the loss."""

    def open(self, link: Link, h: codec_lib.Spec, aux: Any = None) -> Line:
        """Opens the channels to the part before; see `Front.open`."""
        ends = self._to_before(link, h), None
        return self._line(self._half.init_codecs(h), aux, (link, None), ends)

    def step(
        self,
        params: Any,
        micro_batches: Sequence[Any],
        rng: Any,
        step: int,
        line: Line,
        identity: Any = None,
    ) -> tuple[Any, Line, dict[str, jax.Array]]:
        """Takes one batch through this part; see `Front.step`."""
        grads, states, metrics = pipeline.back_step(
            self._half,
            params,
            _weighted(micro_batches),
            rng,
            step,
            line.before.hidden,
            line.before.gradient,
            line.states,
            identity=identity,
        )
        return *self._finish(step, grads, line, states), metrics


def front(
    fn: Callable[..., Any],
    *,
    codec: Codec = "",
    backward_codec: Codec | None = None,
    is_trained: partition.IsTrained = partition.train_all,
    has_loss: bool = False,
    has_aux: bool = False,
    reduce: Reduce = "mean",
    clip_norm: float = 0.0,
    ahead: int | None = None,
) -> Front:
    """Makes the first part of a model.

    Args:
      fn: (params, batch, rng) -> h, pure; with `has_loss`, -> (h, a loss of its own),
        which is added to the last part's. With `has_aux`, (params, aux, batch, rng) ->
        (what it returns otherwise, the new aux), such as a BatchNorm's statistics.
      codec: of h; as the next part's.
      backward_codec: of the gradient in h; `codec` if not given.
      is_trained: path of a parameter, such as `layers/0/kernel` -> True if it trains.
      has_loss, has_aux: see `fn`.
      reduce: mean over the micro-batches of losses and metrics, or sum; the same in all
        parts.
      clip_norm: largest norm of the gradient over all parts, which exchange a number a
        step for it; 0 for none. The same in all parts.
      ahead: micro-batches in flight, each of which keeps what its backward pass needs;
        None for all. The same in all parts.
    """
    names = _codecs(codec, backward_codec)
    half = cut.front(
        _scaled(fn, 1 + has_aux, _scale_own(has_loss, has_aux, reduce)),
        names.forward,
        names.backward,
        is_trained=is_trained,
        has_loss=has_loss,
        has_aux=has_aux,
    )
    return Front(half, names, clip_norm, ahead, reduce)


def middle(
    fn: Callable[..., Any],
    *,
    codec: Codec = "",
    backward_codec: Codec | None = None,
    is_trained: partition.IsTrained = partition.train_all,
    has_loss: bool = False,
    has_aux: bool = False,
    reduce: Reduce = "mean",
    clip_norm: float = 0.0,
    ahead: int | None = None,
) -> Middle:
    """Makes a part between two others.

    Args:
      fn: (params, h, batch, rng) -> h2, pure; with `has_loss` and `has_aux` as in
        `front`: (params, aux, h, batch, rng) -> ...
      codec, backward_codec: of h and h2, and of their gradients, as both neighbors'.
      is_trained, has_loss, has_aux, reduce, clip_norm, ahead: as in `front`.
    """
    names = _codecs(codec, backward_codec)
    half = cut_middle.middle(
        _scaled(fn, 2 + has_aux, _scale_own(has_loss, has_aux, reduce)),
        receive=names.forward,
        reply=names.backward,
        send=names.forward,
        answer=names.backward,
        is_trained=is_trained,
        has_loss=has_loss,
        has_aux=has_aux,
    )
    return Middle(half, names, clip_norm, ahead, reduce)


def back(
    fn: Callable[..., Any],
    *,
    codec: Codec = "",
    backward_codec: Codec | None = None,
    is_trained: partition.IsTrained = partition.train_all,
    has_aux: bool = False,
    reduce: Reduce = "mean",
    clip_norm: float = 0.0,
    ahead: int | None = None,
) -> Back:
    """Makes the last part of a model.

    Args:
      fn: (params, h, batch, rng) -> the loss, a scalar, or (loss, dict of metrics),
        pure. With `has_aux`, (params, aux, h, batch, rng) -> (that, the new aux).
      codec, backward_codec: of h, and of the gradient in it, as the part before.
      is_trained, has_aux, reduce, clip_norm, ahead: as in `front`.
    """
    names = _codecs(codec, backward_codec)

    def scale(out: Any, weight: jax.Array) -> Any:
        out, aux = out if has_aux else (out, None)
        out = _scaled_loss(out, weight if reduce == "mean" else None)
        return (out, aux) if has_aux else out

    half = cut.back(
        _scaled(fn, 2 + has_aux, scale),
        names.forward,
        names.backward,
        is_trained=is_trained,
        has_aux=has_aux,
    )
    return Back(half, names, clip_norm, ahead, reduce)


def spec(
    fn: Callable[..., Any],
    init: Callable[[jax.Array], Any] | Any,
    *inputs: Any,
    has_loss: bool = False,
    aux: Any = None,
) -> codec_lib.Spec:
    """Returns the shapes and dtypes of what a part sends; nothing is computed.

    Args:
      fn: of the part, as given to `front` or `middle`.
      init: its parameters, or key -> its parameters.
      inputs: of a micro-batch, as `fn` takes them before the key: (batch,), or of a
        middle part (h, batch). Arrays, or ShapeDtypeStructs such as `spec` returns.
      has_loss: as given to `front`.
      aux: what a part made with `has_aux` begins with.

    Returns:
      A tree of jax.ShapeDtypeStruct.
    """

    def made(inputs: Any) -> Any:
        key = jax.random.key(0)
        params = init(key) if callable(init) else init
        if aux is None:
            out = fn(params, *inputs, key)
        else:
            out, _ = fn(params, aux, *inputs, key)
        return out[0] if has_loss else out

    return jax.eval_shape(made, inputs)


def _codecs(codec: Codec, backward: Codec | None) -> _Codecs:
    forward, back = (
        codecs.from_string(each) if isinstance(each, str) else each
        for each in (codec, codec if backward is None else backward)
    )
    return _Codecs(forward, back)


def _weighted(micro_batches: Sequence[Any]) -> list[tuple[Any, np.float32]]:
    """Returns each micro-batch with its share of the batch's mean."""
    if not hasattr(micro_batches, "__len__") or not len(micro_batches):
        raise errors.SettingsError(
            "micro_batches has to be a list of one or more, not"
            f" {type(micro_batches).__name__}"
        )
    weight = np.float32(1 / len(micro_batches))
    return [(batch, weight) for batch in micro_batches]


def _scaled(
    fn: Callable[..., Any], place: int, scale: Callable[[Any, jax.Array], Any]
) -> Callable[..., Any]:
    """Returns `fn` for batches with weights, argument number `place`."""

    def run(*arguments: Any) -> Any:
        batch, weight = arguments[place]
        out = fn(*arguments[:place], batch, *arguments[place + 1 :])
        return scale(out, weight)

    return run


def _scale_own(
    has_loss: bool, has_aux: bool, reduce: Reduce
) -> Callable[[Any, jax.Array], Any]:
    """Returns what scales the loss that a part other than the last has of its own."""

    def scale(out: Any, weight: jax.Array) -> Any:
        if not has_loss or reduce == "sum":
            return out
        out, aux = out if has_aux else (out, None)
        hidden, loss = out
        return ((hidden, loss * weight), aux) if has_aux else (hidden, loss * weight)

    return scale


def _scaled_loss(out: Any, weight: jax.Array | None) -> Any:
    """Returns (loss, metrics), each times the weight."""
    loss, metrics = out if isinstance(out, tuple) else (out, {})
    if not isinstance(metrics, dict):
        raise cut.PartError(
            "the last part returns its loss, or (loss, dict of metrics); it returned"
            f" (loss, {type(metrics).__name__})"
        )
    if jnp.shape(loss) != ():
        raise cut.PartError(
            "the last part returns its loss as one number, not of shape"
            f" {list(jnp.shape(loss))}; such as its mean"
        )
    if weight is None:
        return loss, metrics
    return loss * weight, jax.tree.map(lambda value: value * weight, metrics)
