"""Rounds of local steps: the part of one cluster in them, whoever carries the messages.

After H inner steps a cluster sends how far its parameters of a fragment are from the
anchor. Every message names what it is about: the round, the fragment, and the anchor
that it counts from, by version and by digest. One about anything else is refused, so a
divergence of two clusters shows in the next round, and never enters the parameters.

    member = rounds.Member(config, codec, clusters, own, fresh.params, sharding)
    payload = member.outgoing(step, fragment, params)          # to all others
    params = member.incoming(step, fragment, params, payloads) # of all, in their order

R clusters, P fragments.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import ranks
from nebula_jax.training import local_steps

MOST_TOKENS = 2**32 - 1
DIGEST_BYTES = 32


class RoundError(errors.NebulaError):
    """A message that cannot be of this round; the text names round and fragment."""


class Head(NamedTuple):
    """The facts of a message beside its delta; integers from 0 to 2^32 - 1."""

    step: int
    """After which it was sent: this names the round."""
    fragment: int
    version: int
    """Outer steps that made the anchor it counts from."""
    tokens: int
    """Trained on since this cluster's message before of the same fragment."""
    milliseconds: int = 0
    """That the run has lasted in this cluster; with a schedule by time."""
    is_stopping: int = 0
    """1 if this cluster requests the end of the run."""


def message_spec(fragment: local_steps.Fragment) -> dict[str, Any]:
    """Returns the specs of a message's arrays, for its channel.

    Args:
      fragment: specs of its parameters.
    """
    return {
        "head": jax.ShapeDtypeStruct((len(Head._fields),), jnp.uint32),
        "anchor": jax.ShapeDtypeStruct((DIGEST_BYTES,), jnp.uint8),
        "delta": {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for name, leaf in fragment.items()
        },
    }


def check_codec(codec: codec_lib.Codec) -> None:
    """Checks that a message can be decoded by itself, whatever was sent before.

    Raises:
      ValueError: if the receiver of this codec has a state that changes its results.
    """
    first = {
        "vector": jnp.linspace(-1.0, 1.0, 64),
        "matrix": jnp.cos(jnp.arange(256.0)).reshape(16, 16),
    }
    second = jax.tree.map(lambda leaf: leaf**2, first)
    state = codec.init(jax.eval_shape(lambda: first))
    _, after = codec.encode(first, state)
    payload, _ = codec.encode(second, after)
    one, two = (codec.decode(payload, each)[0] for each in (state, after))
    if not all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two))):
        raise ValueError(f"{codec.name}: its receiver remembers what came before")


@dataclasses.dataclass
class _Fragment:
    """The part of a fragment's state that is not an array on a device."""

    version: int = 0
    tokens: int = 0


class Member:
    """One cluster's part in the rounds; also of those that one process simulates.

    outers: P states that all clusters have alike.
    codecs: P states of the codec, this cluster's own.
    Both are arrays of the checkpoint; `position` is the rest.
    """

    def __init__(
        self,
        config: local_steps.Config,
        codec: codec_lib.Codec,
        clusters: Sequence[str],
        own: str,
        shapes: Any,
        sharding: Any = None,
        weights: str = "equal",
    ) -> None:
        """Begins without arrays: `first` makes those of step 0.

        Args:
          config: of the run.
          codec: of the deltas.
          clusters: names of all, in the order in which their deltas are added.
          own: name of this one.
          shapes: specs of the parameters that train.
          sharding: of these, on this cluster's devices; None for one device.
          weights: of the clusters: `equal`, or by the `tokens` of a round.

        Raises:
          ValueError: as `local_steps.split` and `check_codec`.
        """
        check_codec(codec)
        self.config, self._clusters, self._own = config, list(clusters), own
        self._by_tokens = weights == "tokens"
        parts = local_steps.split(shapes, config.fragments)
        self.fingerprint = local_steps.fingerprint(parts)
        self.specs = [message_spec(part) for part in (*parts, {})]
        """P + 1, of the messages; that of the last one, at the end, has no delta."""
        self.codec = codec
        """The codec of the messages."""
        places: list[Any] = [None] * len(self.specs)
        everywhere = None
        if sharding is not None:
            everywhere = _replicated(sharding)
            placed = (*local_steps.split(sharding, config.fragments), {})
            places = [
                {"head": everywhere, "anchor": everywhere, "delta": part}
                for part in placed
            ]
        self._encode = jax.jit(codec.encode, donate_argnums=1, out_shardings=everywhere)
        self._decode = [
            jax.jit(self._decoded(spec), out_shardings=(place, None))
            for spec, place in zip(self.specs, places, strict=True)
        ]
        self.outers: list[local_steps.Outer] = []
        self.codecs: list[Any] = []
        self._fragments = [_Fragment() for _ in parts]
        self._taken: list[Any] = []  # tokens of steps, perhaps still being computed

    def _decoded(self, spec: Any) -> Any:
        """Returns payload -> (message, if all of its delta is finite)."""

        def decode(payload: Any) -> tuple[Any, jax.Array]:
            message, _ = self.codec.decode(payload, self.codec.init(spec))
            is_finite = jnp.asarray(True)
            for leaf in jax.tree.leaves(message["delta"]):
                is_finite &= jnp.all(jnp.isfinite(leaf))
            return message, is_finite

        return decode

    def first(self, params: Any) -> dict[str, Any]:
        """Returns `arrays` at step 0: the anchor is a copy of the parameters."""
        parts = local_steps.split(params, self.config.fragments)
        outers = [
            local_steps.begin(self.config, jax.tree.map(jnp.copy, part))
            for part in parts
        ]
        return {
            "outers": outers,
            "codecs": [self.codec.init(spec) for spec in self.specs[:-1]],
        }

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that belong into a checkpoint."""
        return {"outers": self.outers, "codecs": self.codecs}

    def go_on(
        self, arrays: Mapping[str, Any], position: Mapping[str, Any] | None
    ) -> None:
        """Goes on from a checkpoint, or from `first`.

        Args:
          arrays: like `arrays`.
          position: like `position`; None at step 0.
        """
        self.outers, self.codecs = list(arrays["outers"]), list(arrays["codecs"])
        self._taken.clear()
        if position is not None:
            self._fragments = [
                _Fragment(version, tokens)
                for version, tokens in zip(
                    position["versions"], position["tokens"], strict=True
                )
            ]

    @property
    def position(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        self._count()
        return {
            "versions": self.versions,
            "tokens": [each.tokens for each in self._fragments],
        }

    @property
    def versions(self) -> list[int]:
        """The outer steps that made each fragment's anchor, P."""
        return [each.version for each in self._fragments]

    def took(self, tokens: Any) -> None:
        """Counts the tokens of an inner step, [] integers on any device."""
        self._taken.append(tokens)

    def _count(self) -> None:
        tokens = sum(int(each) for each in jax.device_get(self._taken))
        self._taken.clear()
        for each in self._fragments:
            each.tokens += tokens

    def outgoing(
        self,
        step: int,
        fragment: int,
        params: Any,
        milliseconds: int = 0,
        is_stopping: bool = False,
    ) -> Any:
        """Returns this cluster's message of a round, encoded.

        Args:
          step: after which it is sent.
          fragment: its number.
          params: of this cluster, those that train.
          milliseconds: as in `Head`.
          is_stopping: True to request the end of the run.
        """
        self._count()
        about, anchor = self._fragments[fragment], self.outers[fragment].anchor
        own = local_steps.split(params, self.config.fragments)[fragment]
        head = Head(
            *(step, fragment, about.version, min(about.tokens, MOST_TOKENS)),
            *(milliseconds, int(is_stopping)),
        )
        about.tokens = 0
        message = {
            "head": np.asarray(head, np.uint32),
            "anchor": self.digest(fragment),
            "delta": local_steps.outer_gradient(anchor, own),
        }
        payload, self.codecs[fragment] = self._encode(message, self.codecs[fragment])
        return payload

    def digest(self, fragment: int) -> np.ndarray:
        """Returns the digest of a fragment's anchor, [32] uint8."""
        anchor = ranks.everywhere(self.outers[fragment].anchor)
        return np.frombuffer(local_steps.digest(jax.device_get(anchor)), np.uint8)

    def incoming(
        self, step: int, fragment: int, params: Any, payloads: Sequence[Any]
    ) -> tuple[Any, list[Head]]:
        """Takes the outer step of a round, and mixes the anchor into the parameters.

        Args:
          step: after which the messages were sent.
          fragment: their number.
          params: of this cluster now, those that train.
          payloads: R, of all clusters in their order, this one's own too; None of those
            that the round goes on without.

        Returns:
          The parameters, and the heads of the messages that there were.

        Raises:
          RoundError: if one is of another round or fragment, counts from another
            anchor, or is not finite.
        """
        about, digest = self._fragments[fragment], self.digest(fragment)
        expected = Head(step, fragment, about.version, 0)
        heads, sent = self._checked(expected, digest, payloads)
        tokens = [head.tokens if self._by_tokens else 1 for head in heads]
        outer = local_steps.outer_step(
            *(self.config, self.outers[fragment], list(sent.values())),
            local_steps.weights_of(tokens),
            is_first=about.version == 0,
        )
        before, self.outers[fragment] = self.outers[fragment].anchor, outer
        about.version += 1
        own = local_steps.split(params, self.config.fragments)[fragment]
        if self.config.keeps_unsent:
            after = local_steps.follow(own, sent.get(self._own), before, outer.anchor)
        else:
            after = local_steps.mix(self.config, own, outer.anchor)
        return local_steps.replace(params, after), heads

    def _checked(
        self, expected: Head, digest: np.ndarray, payloads: Sequence[Any]
    ) -> tuple[list[Head], dict[str, local_steps.Fragment]]:
        """Returns the heads of those messages that there are, and their deltas by name.

        In the order of the clusters.
        """
        heads, deltas = [], {}
        where = f"of fragment {expected.fragment} in the round of step {expected.step}"
        for name, payload in zip(self._clusters, payloads, strict=True):
            if payload is None:
                continue
            message, is_finite = self._decode[expected.fragment](payload)
            head, anchor = jax.device_get((message["head"], message["anchor"]))
            found = Head(*map(int, head))
            if (found.step, found.fragment) != (expected.step, expected.fragment):
                raise RoundError(
                    f"{name} sent a delta of fragment {found.fragment} in the round of"
                    f" step {found.step}; expected one {where}"
                )
            if found.version != expected.version:
                raise RoundError(
                    f"{name} sent a delta {where} from version {found.version} of the"
                    f" anchor; {self._own} has version {expected.version}"
                )
            if not np.array_equal(anchor, digest):
                raise RoundError(
                    f"{name} and {self._own} have diverged: their anchors {where},"
                    f" version {expected.version}, differ"
                )
            if not bool(is_finite):
                raise RoundError(f"{name} sent a delta {where} that is not finite")
            heads.append(found)
            deltas[name] = message["delta"]
        return heads, deltas

    def closing(self, step: int) -> Any:
        """Returns the message after the last round: a digest of all anchors.

        Args:
          step: the last one.
        """
        end = len(self.outers)
        message = {
            "head": np.asarray(Head(step, end, self._rounds(), 0), np.uint32),
            "anchor": self._digest_of_all(),
            "delta": {},
        }
        return self._encode(message, self.codec.init(self.specs[-1]))[0]

    def close(self, step: int, params: Any, payloads: Sequence[Any]) -> Any:
        """Returns the parameters at the anchors, which all clusters have alike.

        Args:
          step: the last one.
          params: of this cluster, those that train.
          payloads: R, closing messages of all clusters in their order.

        Raises:
          RoundError: if some cluster has others.
        """
        expected = Head(step, len(self.outers), self._rounds(), 0)
        self._checked(expected, self._digest_of_all(), payloads)
        for outer in self.outers:
            params = local_steps.replace(params, jax.tree.map(jnp.copy, outer.anchor))
        return params

    def _rounds(self) -> int:
        return sum(each.version for each in self._fragments)

    def _digest_of_all(self) -> np.ndarray:
        parts = {str(f): self.digest(f) for f in range(len(self.outers))}
        return np.frombuffer(local_steps.digest(parts), np.uint8)


def _replicated(sharding: Any) -> jax.sharding.NamedSharding:
    """Returns the sharding of a copy on every device of the mesh."""
    mesh = jax.tree.leaves(sharding)[0].mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
