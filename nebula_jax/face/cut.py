"""A model of your own, cut into parts that train as one over slow lines.

    half = nebula.cut.front(front, codec="int8(64)")   # front(params, batch, rng) -> h
    half = nebula.cut.middle(middle, codec=...)        # (params, h, batch, rng) -> h2
    half = nebula.cut.back(back, codec=...)            # (params, h, batch, rng) -> loss

    line = half.open(link, h)                          # channels, for h of this shape
    grads, line, metrics = half.step(params, micro_batches, key, step, line)

Each part of a chain dials the next, which listens. A batch is a list of micro-batches,
which are in flight together in all parts (GPipe). Its loss is the mean of theirs, or
with reduce="sum" their sum. h is any pytree: its floating-point arrays get a gradient.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.communication.codecs import parser
from nebula_jax.models import bottleneck as bottlenecks
from nebula_jax.parallel import pipeline
from nebula_jax.runtime.life import process
from nebula_jax.training import cut, partition

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

    states: cut.States
    before: pipeline.Ends | None = struct.field(pytree_node=False, default=None)
    after: pipeline.Ends | None = struct.field(pytree_node=False, default=None)
    norms: Any = struct.field(pytree_node=False, default=None)

    @property
    def aux(self) -> Any:
        """The newest of what a part made with `has_aux` updates without a gradient."""
        return self.states.aux


class _Norms:
    """The channels for the gradient's norm over all parts."""

    def __init__(self, before: Link | None, after: Link | None, most: float) -> None:
        none, up = codecs.identity(), f"clip_norm={most:g}"
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


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One part of a cut model: its function, and how it is trained.

    Args:
      fn: pure, of the part's parameters and a micro-batch; see `front`, `middle` and
        `back`. A part made with `has_aux` takes the auxiliary state, such as a
        BatchNorm's statistics, after the parameters, and returns (what it returns
        otherwise, the new one).
      codec: of what it sends forward; the same in all parts. Empty for none.
      backward_codec: of the gradient in that; `codec` if not given.
      is_trained: path of a parameter, such as `layers/0/kernel` -> True if it trains.
      has_aux: see `fn`.
      has_loss: True of a part before the last that returns (h, a loss of its own),
        which is added to the last part's.
      reduce: mean over the micro-batches of losses and metrics, or sum; the same in all
        parts.
      clip_norm: largest norm of the gradient over all parts, which exchange a number a
        step for it; 0 for none. The same in all parts.
      ahead: micro-batches in flight, each of which keeps what its backward pass needs;
        None for all. The same in all parts.
    """

    fn: Callable[..., Any]
    _: dataclasses.KW_ONLY
    codec: Codec = ""
    backward_codec: Codec | None = None
    is_trained: partition.IsTrained = partition.train_all
    has_aux: bool = False
    has_loss: bool = False
    reduce: Reduce = "mean"
    clip_norm: float = 0.0
    ahead: int | None = None
    _made: list[codec_lib.Spec] = dataclasses.field(
        default_factory=list, init=False, repr=False
    )
    _has_before: ClassVar[bool] = False
    _has_after: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises errors.SettingsError at what cannot be."""
        if self.reduce not in ("mean", "sum"):
            raise errors.SettingsError(f"reduce={self.reduce}: expected mean or sum")
        if self.ahead is not None and self.ahead < 1:
            raise errors.SettingsError(
                f"ahead={self.ahead}: must be at least 1, or None for all"
            )
        if self.has_loss and not self._has_after:
            raise errors.SettingsError(
                "has_loss is for parts before the last, which returns its loss anyway"
            )
        _ = self._half  # which reads the codecs

    def step(
        self,
        params: Any,
        micro_batches: list[Any],
        rng: Any,
        step: int,
        line: Line,
        identity: Any = None,
    ) -> tuple[Any, Line, dict[str, jax.Array]]:
        """Takes one batch through this part, forward and backward.

        Args:
          params: of this part.
          micro_batches: a list, of this step's batch; as many in each part.
          rng: the run's key, of which each micro-batch gets one of its own; or None.
          step: counted from 1.
          line: used up: go on with the one that is returned.
          identity: what the batch is known by in all parts, such as the numbers of its
            examples: a part that has another batch than the one before ends the run.

        Returns:
          The batch's gradient, the line, and metrics: of the last part its loss and
          what it returned beside it, as means over the micro-batches or as sums; of the
          others nothing.

        Raises:
          errors.SettingsError: if there is no micro-batch, or one of another shape than
            a line was opened for, or the line is used up.
        """
        weighted = _weighted(micro_batches)
        if any(map(_is_deleted, jax.tree.leaves(line.states))):
            raise errors.SettingsError(
                f"step {step}: this line is used up; go on with the one that the step"
                " before returned: grads, line, metrics = half.step(..., line)"
            )
        passes: Any = pipeline.back_step
        if line.after is not None:
            ahead = self.ahead or len(weighted)
            passes = functools.partial(
                pipeline.front_step, ahead=ahead, before=line.before
            )
        grads, states, measured = passes(
            self._half,
            params,
            weighted,
            rng,
            step,
            *(line.after or line.before or ()),
            line.states,
            identity=identity,
        )
        if not _is_compared(line, micro_batches):
            _report_uncompared()
        if line.norms is not None:
            own = jnp.square(optax.tree.norm(grads)).astype(jnp.float32)
            squared = line.norms.total(step, own)
            grads = _clipped(grads, squared, np.float32(self.clip_norm))
        # Of a part before the last that is no dict, but the sum of its own losses.
        metrics = measured if line.after is None else {}
        return grads, dataclasses.replace(line, states=states), metrics

    @property
    def _codecs(self) -> list[selector.CodecOrSelector]:
        """The codecs of what goes forward, and of its gradient."""
        backward = self.codec if self.backward_codec is None else self.backward_codec
        given = {"codec": self.codec, "backward_codec": backward}
        return [parser.given(name, each) for name, each in given.items()]

    @functools.cached_property
    def _half(self) -> Any:
        make: Any = cut.back
        if self._has_after:
            make = functools.partial(
                cut.front, has_loss=self.has_loss, has_h=self._has_before
            )
        return make(
            self._run, *self._codecs, is_trained=self.is_trained, has_aux=self.has_aux
        )

    def _run(self, *arguments: Any) -> Any:
        """Calls `fn` on a batch with its weight, which scales losses and metrics."""
        *first, (batch, weight), rng = arguments
        out = _called(self.fn, *first, batch, rng)
        if self.reduce == "sum":
            weight = None
        scaled = self._made_of if self._has_after else _loss_of
        if not self.has_aux:
            return scaled(out, weight)
        # What is no pair, the cut refuses.
        is_pair = isinstance(out, tuple) and len(out) == 2
        return (scaled(out[0], weight), out[1]) if is_pair else out

    def _made_of(self, out: Any, weight: jax.Array | None) -> Any:
        """Returns h of a part before the last, with its loss if it has one."""
        hidden, loss = cut.with_loss(out) if self.has_loss else (out, 0.0)
        _check_loss("a part with has_loss returns its own", loss)
        codec_lib.check_arrays("h", hidden)
        found = [codec_lib.difference(each, hidden) for each in self._made]
        differences = list(filter(None, found))
        # Here, since a codec with a state may take other shapes without a word.
        if found and len(differences) == len(found):
            opened, made = differences[-1]
            raise cut.PartError(
                f"a micro-batch makes h of {made}, and half.open was given {opened}:"
                " each needs the shapes of the one that nebula.cut.spec saw"
            )
        if not self.has_loss or weight is None:
            return out
        return hidden, loss * weight

    def _opened(
        self, before: Link | None, after: Link | None, *specs: codec_lib.Spec, aux: Any
    ) -> Line:
        """Opens the channels to the neighbors; `specs` are of what crosses to each."""
        forward, backward = self._codecs
        # In the name, so that parts with other settings are refused as they meet.
        about = [f"ahead={self.ahead}"] * (self.ahead is not None)
        name = ", ".join(["hidden", *about, *["reduce=sum"] * (self.reduce == "sum")])
        ends: dict[str, pipeline.Ends] = {}
        if before is not None:
            receiver = before.receiver(name, specs[0], forward)
            sender = before.sender("gradient", specs[0], backward)
            ends["before"] = pipeline.Ends(receiver, sender)
        if after is not None:
            sender = after.sender(name, specs[-1], forward)
            receiver = after.receiver("gradient", specs[-1], backward)
            self._made.append(specs[-1])
            ends["after"] = pipeline.Ends(sender, receiver)
        states = self._half.init_states(*specs, aux=aux)
        norms = _Norms(before, after, self.clip_norm) if self.clip_norm else None
        return Line(states=states, norms=norms, **ends)


class Front(Part):
    """The first part of a model.

    Args:
      fn: (params, batch, rng) -> h, pure; with `has_loss`, -> (h, a loss of its own).
      others: see help(nebula.cut.Part).
    """

    _has_after = True

    def open(self, link: Link, h: codec_lib.Spec, aux: Any = None) -> Line:
        """Opens the channels to the next part.

        Args:
          link: to it, from `Run.dial`.
          h: ShapeDtypeStructs of a micro-batch's h, from `spec`; the same there.
          aux: what a part made with `has_aux` begins with.
        """
        return self._opened(None, link, h, aux=aux)


class Middle(Part):
    """A part between two others.

    Args:
      fn: (params, h, batch, rng) -> h2, pure; with `has_loss` as of Front.
      others: see help(nebula.cut.Part).
    """

    _has_before = _has_after = True

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
        return self._opened(before, after, h, made, aux=aux)


class Back(Part):
    """The last part of a model, which has the loss.

    Args:
      fn: (params, h, batch, rng) -> the loss, a scalar, or (loss, dict of metrics),
        pure.
      others: see help(nebula.cut.Part).
    """

    _has_before = True

    def open(self, link: Link, h: codec_lib.Spec, aux: Any = None) -> Line:
        """Opens the channels to the part before; see `Front.open`."""
        return self._opened(link, None, h, aux=aux)


front, middle, back = Front, Middle, Back


def spec(
    fn: Callable[..., Any],
    init: Callable[[jax.Array], Any] | Any,
    *inputs: Any,
    has_loss: bool = False,
    aux: Any = None,
) -> codec_lib.Spec:
    """Returns a part's h as a tree of jax.ShapeDtypeStruct; nothing is computed.

    Args:
      fn: of the part, as given to `front` or `middle`.
      init: its parameters, or key -> its parameters.
      inputs: of a micro-batch, as `fn` takes them before the key: (batch,), or of a
        middle part (h, batch). Arrays, or ShapeDtypeStructs such as `spec` returns.
      has_loss: as given to `front`.
      aux: what a part made with `has_aux` begins with.
    """

    def made(aux: Any, inputs: Any) -> Any:
        called = functools.partial(_called, fn)
        key, run = jax.random.key(0), cut.with_aux(called, aux is not None)
        # A module of Equinox is a pytree of parameters that can be called.
        is_function = callable(init) and jax.tree_util.all_leaves([init])
        params = init(key) if is_function else init
        partition.check(params)
        out, _ = run(params, aux, *inputs, key)
        h = cut.with_loss(out)[0] if has_loss else out
        cut.activations_of(h)  # which refuses what no gradient can come back for
        return h

    # Traced, as in a step: NNX refuses to change statistics of outside.
    return jax.eval_shape(made, aux, inputs)


def _called(fn: Callable[..., Any], params: Any, *given: Any) -> Any:
    """Calls a part's function; an error in it also names its line, and what it got."""
    try:
        return fn(params, *given)
    except Exception as error:  # whose own last lines are those of a library
        if (inside := error.__traceback__) and (inside := inside.tb_next):
            code = inside.tb_frame.f_code
            types = jax.tree.map(lambda leaf: str(jax.typeof(leaf)), given)
            where = f"{code.co_filename}:{inside.tb_lineno}: in {code.co_name}"
            error.add_note(f"{where}, given after the parameters: {types}")
        raise


def _loss_of(out: Any, weight: jax.Array | None) -> Any:
    """Returns the last part's loss and metrics, by their share of the batch's."""
    loss, metrics = cut.loss_and_metrics(out)
    _check_loss("the last part returns its", loss)
    if weight is None:
        return loss, metrics
    return loss * weight, jax.tree.map(lambda value: value * weight, metrics)


def _check_loss(which: str, loss: Any) -> None:
    is_leaf = jax.tree_util.all_leaves([loss])
    if not is_leaf or jnp.shape(loss) != ():
        found = f"of shape {list(jnp.shape(loss))}" if is_leaf else f"{type(loss)}"
        raise cut.PartError(
            f"{which} loss as one number, not {found}; such as its mean"
        )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise cut.PartError(
            f"{which} loss as a floating-point number, not {jnp.result_type(loss)},"
            " which has no gradient: take the mean of floats, with no astype behind it"
        )


def _is_compared(line: Line, micro_batches: list[Any]) -> bool:
    # A part without batches, such as one that has no targets, has none to mix.
    if line.before is None or not jax.tree.leaves(micro_batches):
        return True
    return line.before.hidden.is_compared


@functools.cache  # it is said once
def _report_uncompared() -> None:
    process.message(
        "the batches of the parts are not compared: a part that is a batch ahead would"
        " train on rows that do not fit. Pass identity=, such as the numbers of the"
        " examples, to half.step in all parts"
    )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _weighted(micro_batches: list[Any]) -> list[tuple[Any, np.float32]]:
    """Returns each micro-batch with its share of the batch's mean."""
    if not isinstance(micro_batches, list) or not micro_batches:
        # An array, a dict or a tuple (inputs, targets) would be taken apart.
        is_list = isinstance(micro_batches, list)
        what = "an empty one" if is_list else type(micro_batches).__name__
        raise errors.SettingsError(
            "micro_batches has to be a list of one or more, not"
            f" {what}: [batch] for a whole batch, or np.split(array, count)"
        )
    weight = np.float32(1 / len(micro_batches))
    return [(batch, weight) for batch in micro_batches]
