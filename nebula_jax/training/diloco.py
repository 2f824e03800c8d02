"""DiLoCo: every cluster trains a replica, and an outer step joins them every H steps.

Section 2.1's "each worker computes multiple steps first and then the gradients are
aggregated", as Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) and
SparseLoCo (2508.15706) do it. All clusters have the same anchor A. The parameters are
parted into P fragments, of which each has a round every H inner steps:

    after step t, (t - p H / P) mod H = 0    send d = A_p - theta_p
    after step t + tau                       D = mean of all d, each as it was received
                                             A_p <- A_p - outer optimizer(D)
                                             theta_p <- alpha theta_p + (1 - alpha) A_p

Parameters are any pytree; anchors and deltas are float32, whatever narrower type they
have. Functions here are pure. In an outer step each operation rounds by itself, so that
clusters of different devices have the same bits.

R clusters, P fragments.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nebula_jax import errors
from nebula_jax.training import finite, partition

ENOUGH_STEPS = 24  # inner steps of a round from which Nesterov's momentum does no harm
MOMENTUM = 0.9  # Streaming DiLoCo's
TINY = 2.0**-126  # least normal float32: some devices have no smaller ones

Fragment = dict[str, jax.Array]
"""Path of a parameter, as in `encoder/layer_0/output/kernel` -> array."""
Places = dict[str, int]
"""Path of a parameter that trains -> its fragment, from 0 to P - 1."""
FragmentOf = Callable[[str], int | str]
"""Path of a parameter -> number of its fragment, or any name for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """The settings of rounds that need not know the fragments."""

    inner_steps: int
    """H, steps of a cluster between two rounds of a fragment."""
    delay: int = 0
    """tau, steps from a fragment's sending until it is applied, time for the line;
    below H // P."""
    learning_rate: float = 0.7
    """Learning rate of the outer optimizer."""
    momentum: float | None = None
    """Momentum of the outer optimizer, Nesterov's; None for MOMENTUM where a round has
    ENOUGH_STEPS, else 0: with few steps it costs up to 9 % of the loss."""
    is_robust: bool = False
    """True to scale each delta down to the median norm of its round before the mean: no
    cluster alone moves the anchor far. With two clusters that is the mean of both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(OuterSettings):
    """The settings of local steps; all clusters have the same."""

    fragments: int = 1
    """P, parts of the parameters that have their rounds one after the other."""
    mixing: float = 0.5
    """alpha, the share of a cluster's own parameters when a fragment is applied."""

    def __post_init__(self) -> None:
        """Raises errors.SettingsError, which begins with a field's name."""
        steps, fragments = self.inner_steps, self.fragments
        between = steps // max(1, fragments)
        gap = f"the {between} steps between two fragments (inner_steps / fragments)"
        for name, is_right, rule in (
            ("inner_steps", steps >= 1, "at least 1"),
            ("fragments", 1 <= fragments <= steps, f"from 1 to inner_steps={steps}"),
            ("delay", 0 <= self.delay < between, f"below {gap}"),
            ("mixing", 0 <= self.mixing < 1, "in [0, 1)"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("momentum", 0 <= self.outer_momentum < 1, "in [0, 1)"),
        ):
            if not is_right:
                raise errors.SettingsError(
                    f"{name} must be {rule}, not {getattr(self, name)}"
                )

    @property
    def outer_momentum(self) -> float:
        """The momentum of the outer optimizer."""
        if self.momentum is None:
            return MOMENTUM if self.inner_steps >= ENOUGH_STEPS else 0.0
        return self.momentum

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The outer optimizer: Nesterov's, or plain descent."""
        has_momentum = self.outer_momentum > 0
        return optax.sgd(
            self.learning_rate,
            self.outer_momentum if has_momentum else None,
            nesterov=has_momentum,
        )

    def sent_after(self, step: int) -> int | None:
        """Returns the fragment that is sent after a step, if any; steps count from 1.

        >>> config = Config(inner_steps=10, fragments=2, delay=3)
        >>> [(step, config.sent_after(step)) for step in (4, 5, 10, 15, 20)]
        [(4, None), (5, 1), (10, 0), (15, 1), (20, 0)]
        """
        place = step % self.inner_steps
        for fragment in range(self.fragments):
            if step > 0 and place == fragment * self.inner_steps // self.fragments:
                return fragment
        return None

    def applied_after(self, step: int) -> int | None:
        """Returns the fragment that is applied after a step, if any."""
        return self.sent_after(step - self.delay)

    def next_sent(self, step: int) -> tuple[int, int]:
        """Returns the first step from `step` on that sends, and its fragment."""
        while (fragment := self.sent_after(step)) is None:
            step += 1
        return step, fragment

    def last_rounds(self, step: int) -> list[tuple[int, int]]:
        """Returns the rounds that are still to be applied after a run's last step.

        The one that is in flight, if any; then one of every other fragment.

        >>> Config(inner_steps=8, fragments=4, delay=1).last_rounds(8)
        [(8, 0), (8, 1), (8, 2), (8, 3)]
        """
        in_flight = [
            (step - ago, fragment)
            for ago in range(self.delay)
            if (fragment := self.sent_after(step - ago)) is not None
        ]
        done = self.sent_after(step)
        rest = [(step, each) for each in range(self.fragments) if each != done]
        return in_flight + rest

    def is_in_flight(self, step: int) -> bool:
        """Returns True if after a step a fragment is sent and not yet applied."""
        return any(self.sent_after(step - ago) is not None for ago in range(self.delay))

    def is_saved_after(self, step: int, every: int) -> bool:
        """Returns True if a checkpoint is due after a step.

        None is saved while a fragment is in flight: its message would have to be saved
        too. So one that is due then comes as soon as the fragment is applied. Steps
        count from 1; `every` so many of them a checkpoint is due.
        """
        if self.is_in_flight(step):
            return False
        while step > 0:
            if step % every == 0:
                return True
            step -= 1
            if not self.is_in_flight(step):  # then it was saved
                return False
        return False


class Outer(NamedTuple):
    """The part of a fragment's state that all clusters have alike."""

    anchor: Fragment  # A_p, float32
    optimizer: optax.OptState  # of `Config.optimizer`


def begin(config: Config, params: Fragment) -> Outer:
    """Returns the state of a fragment before its first round: the anchor is a copy."""
    anchor = {
        path: jnp.copy(leaf).astype(type_of_anchor(leaf))
        for path, leaf in params.items()
    }
    return Outer(anchor, config.optimizer.init(anchor))


def type_of_anchor(leaf: Any) -> Any:
    """Returns the type of a parameter's anchor and delta: float32 at least.

    In bfloat16 an anchor would lose every outer step below 1/256 of its values.
    """
    return jnp.promote_types(leaf.dtype, jnp.float32)


def places(
    params: Any,
    fragments: int | FragmentOf = 1,
    is_trained: partition.IsTrained = partition.train_all,
) -> Places:
    """Gives each parameter that trains a fragment; all others never cross.

    Integers, booleans and keys do not train: each cluster keeps its own. `params` is
    any pytree of arrays or of their specs. `fragments` is P, for parts of about the
    same size, of leaves that follow each other in the pytree. Or it is a function of a
    path: its numbers count from 0, its names are fragments in the order in which they
    come. Raises errors.SettingsError if a leaf is no array, two have one path, none
    trains, or a fragment would have none.
    """
    sizes: dict[str, int] = {}
    for path, leaf in partition.named(params):
        if path in sizes:
            raise errors.SettingsError(
                f"params: two leaves have the path {path}; rename one"
            )
        if not hasattr(leaf, "dtype"):
            raise errors.SettingsError(
                f"params: the leaf {path or '(all of it)'} is of the type"
                f" {type(leaf).__name__}; give arrays alone, as of"
                " equinox.filter(model, equinox.is_array)"
            )
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating) and is_trained(path):
            raise errors.SettingsError(
                f"params: the leaf {path} is complex; give its real and imaginary part"
            )
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        sizes[path] = leaf.size if is_float and is_trained(path) else -1
    sizes = {path: size for path, size in sizes.items() if size >= 0}
    if not sizes:
        partition.check_any_trains(params)
        raise errors.SettingsError("params: no floating-point array of it trains")
    if isinstance(fragments, int):
        return _evenly(sizes, fragments)
    found = {path: fragments(path) for path in sizes}
    numbers: dict[int | str, int] = {}
    for each in found.values():
        numbers.setdefault(each, len(numbers))
    if all(isinstance(each, int) for each in numbers):
        if set(numbers) != set(range(len(numbers))):
            raise errors.SettingsError(
                f"fragments: the function gives {sorted(map(str, numbers))}; every"
                f" number from 0 on needs a parameter"
            )
        numbers = {each: int(each) for each in numbers}
    return {path: numbers[each] for path, each in found.items()}


def _evenly(sizes: Mapping[str, int], fragments: int) -> Places:
    """Cuts leaves, in their order, into P parts of about the same size.

    >>> _evenly({"a": 4, "b": 1, "c": 2, "d": 1}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 1}
    """
    if not 1 <= fragments <= len(sizes):
        raise errors.SettingsError(
            f"fragments={fragments}: there are {len(sizes)} arrays that train, of which"
            " each fragment needs one"
        )
    found: Places = {}
    number = size = 0
    rest = sum(sizes.values())  # of this fragment and of those after it
    for before, (path, more) in enumerate(sizes.items()):
        after = fragments - number - 1  # fragments that are still to come
        is_full = size + more / 2 > rest / (after + 1)
        is_needed = len(sizes) - before == after  # a leaf for each of these
        if after and size and (is_full or is_needed):
            number, rest, size = number + 1, rest - size, 0
        found[path] = number
        size += more
    return found


def split(params: Any, where: Places) -> list[Fragment]:
    """Parts a tree of arrays, specs or shardings into P fragments, by `places`."""
    parts: list[Fragment] = [{} for _ in range(1 + max(where.values()))]
    for path, leaf in partition.named(params):
        if path in where:
            parts[where[path]][path] = leaf
    return parts


def replace(params: Any, fragment: Fragment) -> Any:
    """Returns the parameters with those of a fragment in their places, and types."""

    def new(path: str, leaf: Any) -> Any:
        return fragment[path].astype(leaf.dtype) if path in fragment else leaf

    return partition.map_named(new, params)


def outer_gradient(anchor: Fragment, params: Fragment) -> Fragment:
    """Returns d = A_p - theta_p: the anchor minus a cluster's own parameters."""
    return {path: anchor[path] - params[path] for path in anchor}


def norm(delta: Mapping[str, Any]) -> float:
    """Returns the L2 norm of a delta, of arrays on the host."""
    squares = [np.sum(np.square(leaf, dtype=np.float64)) for leaf in delta.values()]
    return math.sqrt(sum(map(float, squares)))


def robust_weights(weights: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Returns weights with which no delta counts for more than the median norm.

    The factors have 12 bits: the last bits of a norm depend on the machine.

    >>> robust_weights([0.25, 0.5, 0.25], [1.0, 2.0, 8.0])
    [0.25, 0.5, 0.0625]
    """
    most = float(np.median(norms))

    def factor(size: float) -> float:
        mantissa, exponent = math.frexp(most / size if size > most else 1.0)
        return math.ldexp(round(mantissa * 4096) / 4096, exponent)

    return [weight * factor(size) for weight, size in zip(weights, norms, strict=True)]


def outer_step(
    config: Config,
    outer: Outer,
    deltas: Sequence[Fragment],
    weights: Sequence[float],
    is_first: bool,
) -> Outer:
    """Takes DiLoCo's outer step; every cluster comes to the same bits.

    Not for another function's `jit`, whose compiler would fuse what is kept apart here.
    Of R deltas, what every cluster has sent, decoded, and R weights in the same order;
    their sum is 1, or less if they are robust. Nesterov's first step would be
    1 + momentum times a plain one; in the first round of a fragment this one is plain.
    """
    first = 1 / (1 + config.outer_momentum) if is_first else 1.0
    shares = tuple(np.float32(weight) for weight in weights)
    return _outer_step(config, outer, deltas, shares, np.float32(first), np.uint32(0))


@functools.partial(jax.jit, static_argnums=0)
def _outer_step(
    config: Config,
    outer: Outer,
    deltas: Sequence[Fragment],
    shares: Sequence[jax.Array],
    first: jax.Array,
    zero: jax.Array,
) -> Outer:
    """Takes the step in one pass; `zero` is one that the compiler must not know."""

    def product(one: Any, other: Any) -> jax.Array:
        """Multiplies and rounds: through a change of its bits no sum is fused to it."""
        found = jnp.asarray(one * other)
        bits = jnp.dtype(f"uint{8 * found.dtype.itemsize}")
        changed = jax.lax.bitcast_convert_type(found, bits) ^ zero.astype(bits)
        return jax.lax.bitcast_convert_type(changed, found.dtype)

    def with_momentum(gradient: jax.Array, velocity: jax.Array) -> jax.Array:
        return gradient + product(velocity, np.float32(config.outer_momentum))

    def mean(*parts: jax.Array) -> jax.Array:
        total = product(parts[0], shares[0])
        for part, share in zip(parts[1:], shares[1:], strict=True):
            total += product(part, share)
        return total

    def moved(anchor: jax.Array, gradient: jax.Array) -> jax.Array:
        update = product(gradient, np.float32(-config.learning_rate))
        return anchor + product(update, first)

    gradient, optimizer = jax.tree.map(mean, *deltas), outer.optimizer
    if config.outer_momentum:
        nesterov, *rest = optimizer
        velocity = jax.tree.map(with_momentum, gradient, nesterov.trace)
        gradient = jax.tree.map(with_momentum, gradient, velocity)
        optimizer = nesterov._replace(trace=velocity), *rest
    anchor = jax.tree.map(moved, outer.anchor, gradient)
    return jax.tree.map(_without_denormals, Outer(anchor, optimizer))


def is_finite(outer: Outer) -> bool:
    """Returns True if the anchor and the outer optimizer's state are finite."""
    return bool(_all_finite(outer))


_all_finite = jax.jit(finite.all_finite)


def largest(delta: Fragment) -> float:
    """Returns the largest absolute value of a delta."""
    found = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in delta.values()]
    return max(map(float, found))


def _without_denormals(leaf: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(leaf) < TINY, jnp.zeros_like(leaf), leaf)


def mix(config: Config, params: Fragment, anchor: Fragment) -> Fragment:
    """Returns alpha theta_p + (1 - alpha) A_p; copies, which a step may use up."""
    if not config.mixing:
        return jax.tree.map(jnp.copy, anchor)
    own, others = np.float32(config.mixing), np.float32(1 - config.mixing)
    return {path: params[path] * own + anchor[path] * others for path in anchor}


def digest(arrays: Mapping[str, Any]) -> bytes:
    """Returns the SHA-256 of arrays on the host, by name: 32 bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(name.encode() + b"\0")
        # As bytes: NumPy gives no buffer of a bfloat16.
        found.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return found.digest()


def fingerprint(fragments: Sequence[Fragment]) -> str:
    """Returns a digest of the layout: what is in each fragment, its shape and dtype."""
    layout = [
        [
            (name, tuple(leaf.shape), str(leaf.dtype))
            for name, leaf in sorted(each.items())
        ]
        for each in fragments
    ]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
