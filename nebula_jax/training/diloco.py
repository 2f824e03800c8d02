"""DiLoCo: every cluster trains a replica, and an outer step joins them every H steps.

Section 2.1's "each worker computes multiple steps first and then the gradients are
aggregated", as Streaming DiLoCo does it (Douillard et al. 2025, arXiv 2501.18512), and
as SparseLoCo does (2508.15706). All clusters have the same anchor A. Its parameters are
parted into P fragments, of which each has a round every H inner steps:

    after step t, (t - p H / P) mod H = 0    send d = A_p - theta_p
    after step t + tau                       D = mean of all d, each as it was received
                                             A_p <- A_p - outer optimizer(D)
                                             theta_p <- alpha theta_p + (1 - alpha) A_p

Functions here are pure, and those of the anchor are to be called without `jit`: then
each operation rounds by itself, and clusters of different devices have the same bits.

R clusters.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

ENOUGH_STEPS = 24
"""Inner steps of a round from which on Nesterov's momentum does no harm."""
MOMENTUM = 0.9
"""Streaming DiLoCo's."""
AVERAGES = ("clusters", "senders")
TINY = 2.0**-126  # least normal float32: some devices have no smaller ones

_LAYER = re.compile(r"(?:^|/)(?:layer|adapters?)_(\d+)(?:/|$)")
_FIRST = re.compile(r"(?:^|/)embeddings/")

Fragment = dict[str, jax.Array]
"""Path of a parameter, as in `encoder/layer_0/output/kernel` -> array."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of local steps; all clusters have the same."""

    inner_steps: int
    """H, steps of a cluster between two rounds of a fragment."""
    fragments: int = 1
    """P; divides the number of layers."""
    delay: int = 0
    """tau, steps from a fragment's sending until it is applied; below H // P."""
    mixing: float = 0.5
    """alpha, the share of a cluster's own parameters when a fragment is applied."""
    learning_rate: float = 0.7
    """Learning rate of the outer optimizer."""
    momentum: float | None = None
    """Momentum of the outer optimizer, Nesterov's; None for MOMENTUM where a round has
    ENOUGH_STEPS, else 0: with few steps it costs up to 9 % of the loss."""
    average: str = "clusters"
    """`clusters` divides a sum by R; `senders`, each value by those that sent it."""
    keeps_unsent: bool = False
    """True if a cluster's own parameters keep what it has not sent, in place of mixing:
    for a codec that sends a part of the values, and remembers none of the rest."""

    def __post_init__(self) -> None:
        """Raises ValueError, which begins with a field's name, at what cannot be."""
        if self.inner_steps < 1:
            raise ValueError(f"inner_steps must be at least 1, not {self.inner_steps}")
        if not 1 <= self.fragments <= self.inner_steps:
            raise ValueError(
                f"fragments must be from 1 to inner_steps={self.inner_steps}, not"
                f" {self.fragments}"
            )
        between = self.inner_steps // self.fragments
        if not 0 <= self.delay < between:
            raise ValueError(
                f"delay must be below the {between} steps between two fragments"
                f" (inner_steps / fragments), not {self.delay}"
            )
        if not 0 <= self.mixing < 1:
            raise ValueError(f"mixing must be in [0, 1), not {self.mixing}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, not {self.learning_rate}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
        if self.average not in AVERAGES:
            raise ValueError(f"average must be one of {AVERAGES}, not {self.average}")

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

        Args:
          step: the last one of the run.

        Returns:
          Steps after which the messages are sent, and the fragments.
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
        too. So one that is due then comes as soon as the fragment is applied.

        Args:
          step: counted from 1.
          every: steps between checkpoints.
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
    """The part of a fragment's state that all clusters have alike.

    anchor: A_p, float32.
    optimizer: state of `Config.optimizer`.
    """

    anchor: Fragment
    optimizer: optax.OptState


def begin(config: Config, anchor: Fragment) -> Outer:
    """Returns the state of a fragment before its first round."""
    return Outer(anchor, config.optimizer.init(anchor))


def split(params: Any, fragments: int) -> list[Fragment]:
    """Parts parameters into P fragments, layer i into fragment i mod P.

    What comes before the layers (embeddings) is in the first fragment, what comes after
    (heads) in the last.

    Args:
      params: tree of arrays or of their specs. A layer's are below `layer_<i>`, an
        adapter's below `adapter_<i>` or `adapters_<i>`.
      fragments: P.

    Raises:
      ValueError: if P does not divide the number of layers.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    found = {int(layer[1]) for path in leaves if (layer := _LAYER.search(path))}
    layers = max(found, default=-1) + 1
    if layers % fragments or (fragments > 1 and not layers):
        raise ValueError(
            f"fragments={fragments} does not divide the {layers} layers that train"
        )
    parts: list[Fragment] = [{} for _ in range(fragments)]
    for path, leaf in leaves.items():
        layer = _LAYER.search(path)
        if layer:
            number = int(layer[1]) % fragments
        else:
            number = 0 if _FIRST.search(path) else fragments - 1
        parts[number][path] = leaf
    return parts


def replace(params: Any, fragment: Fragment) -> Any:
    """Returns the parameters with those of a fragment in their places."""

    def new(path: tuple[Any, ...], leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return fragment.get(name, leaf)

    return jax.tree_util.tree_map_with_path(new, params)


def outer_gradient(anchor: Fragment, params: Fragment) -> Fragment:
    """Returns d = A_p - theta_p: the anchor minus a cluster's own parameters."""
    return {path: anchor[path] - params[path] for path in anchor}


def weights_of(tokens: Sequence[int]) -> list[float]:
    """Returns the weights of clusters by the tokens that they have trained on.

    >>> weights_of([300, 100])
    [0.75, 0.25]
    """
    total = sum(tokens)
    return [each / total if total else 1 / len(tokens) for each in tokens]


def outer_step(
    config: Config,
    outer: Outer,
    deltas: Sequence[Fragment],
    weights: Sequence[float],
    is_first: bool,
) -> Outer:
    """Takes DiLoCo's outer step; every cluster comes to the same bits.

    Args:
      config: of the run.
      outer: of the fragment, before.
      deltas: R, what every cluster has sent, decoded, in the order of the clusters.
      weights: R, of the clusters; their sum is 1.
      is_first: True in the first round of the fragment. Nesterov's first step would be
        1 + momentum times a plain one; this one is plain.
    """
    gradient = _average(config, deltas, weights)
    updates, optimizer = config.optimizer.update(gradient, outer.optimizer)
    if is_first and config.outer_momentum:
        plain = np.float32(1 / (1 + config.outer_momentum))
        updates = jax.tree.map(lambda update: update * plain, updates)
    anchor = optax.apply_updates(outer.anchor, updates)
    return jax.tree.map(_without_denormals, Outer(anchor, optimizer))


def _average(
    config: Config, deltas: Sequence[Fragment], weights: Sequence[float]
) -> Fragment:
    """Returns the weighted mean of what the clusters have sent, in their order."""
    shares = [np.float32(weight) for weight in weights]

    def mean(*parts: jax.Array) -> jax.Array:
        total = parts[0] * shares[0]
        for part, share in zip(parts[1:], shares[1:], strict=True):
            total = total + part * share
        if config.average == "clusters":
            return total
        sent = jnp.where(parts[0] != 0, shares[0], np.float32(0))
        for part, share in zip(parts[1:], shares[1:], strict=True):
            sent = sent + jnp.where(part != 0, share, np.float32(0))
        return total / jnp.where(sent > 0, sent, np.float32(1))

    return jax.tree.map(mean, *deltas)


def _without_denormals(leaf: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(leaf) < TINY, jnp.zeros_like(leaf), leaf)


def mix(config: Config, params: Fragment, anchor: Fragment) -> Fragment:
    """Returns alpha theta_p + (1 - alpha) A_p; copies, which a step may use up.

    Args:
      config: of the run.
      params: of this cluster.
      anchor: after the round.
    """
    if not config.mixing:
        return jax.tree.map(jnp.copy, anchor)
    own, others = np.float32(config.mixing), np.float32(1 - config.mixing)
    return {path: params[path] * own + anchor[path] * others for path in anchor}


def follow(
    params: Fragment, sent: Fragment | None, before: Fragment, after: Fragment
) -> Fragment:
    """Returns parameters that keep what has not been sent, and take the rest.

    What was sent is in the anchor now, at its share of the mean. So it is taken back,
    and the parameters move as the anchor did: they are at the new anchor, but for what
    this cluster has learned and not sent.

    Args:
      params: of this cluster, now.
      sent: its delta, as it was received; None if the round closed without it.
      before, after: the anchor, before the round and after it.
    """
    found = {path: params[path] + (after[path] - before[path]) for path in after}
    return found if sent is None else {path: found[path] + sent[path] for path in sent}


def digest(arrays: Mapping[str, Any]) -> bytes:
    """Returns the SHA-256 of arrays on the host, by name: 32 bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(name.encode() + b"\0")
        found.update(np.ascontiguousarray(arrays[name]).data)
    return found.digest()


def fingerprint(fragments: Sequence[Fragment]) -> str:
    """Returns a digest of the layout: what is in each fragment, its shape and dtype.

    Args:
      fragments: P, arrays or their specs.
    """
    layout = [
        [
            (name, tuple(leaf.shape), str(leaf.dtype))
            for name, leaf in sorted(each.items())
        ]
        for each in fragments
    ]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
