"""One cluster's part in the rounds of local steps, whatever carries the messages.

After H inner steps a cluster sends how far its parameters of a fragment are from the
anchor. Every message names the round, the fragment, and the anchor that it counts from,
by version and by digest; one about any other is refused. So a divergence of two
clusters shows in the next round, and never enters the parameters.

R clusters, P fragments.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.selector import Selected
from nebula_jax.parallel.local_steps import messages
from nebula_jax.parallel.local_steps import settings as settings_lib
from nebula_jax.training import diloco, finite


class RoundError(errors.NebulaError):
    """A message that cannot be of this round; the text names round and fragment."""


class Member:
    """One cluster's part in the rounds; also of those that one process simulates.

    Its `arrays` for a checkpoint are `outers`, P states that all clusters have alike,
    and `codecs`, P states of this cluster's own codec; `position` is the rest.
    """

    def __init__(
        self,
        settings: settings_lib.Settings,
        clusters: Sequence[str],
        own: str,
        params: Any,
    ) -> None:
        """Begins at step 0; without arrays if `params`, on a mesh or not, are specs.

        Deltas are added in the order of `clusters`. Raises errors.SettingsError at what
        cannot be; it begins with a setting's name.
        """
        self._clusters, self._own = list(clusters), own
        where = diloco.places(params, settings.fragments, settings.is_trained)
        self._where = where
        parts = diloco.split(params, where)
        self.config = settings.config(len(parts))
        self.codec = codec = settings.compression
        messages.check_codec(codec)
        shares = settings.share(self._clusters.index(own), len(clusters)).parts
        self._shares = dict(zip(clusters, shares, strict=True))
        self.fingerprint = diloco.fingerprint(parts)
        self.specs = [messages.spec(part) for part in [*parts, {}]]
        """P + 1, of the messages; that of the last one, at the end, has no delta."""
        self._encode, self._decode = _compiled(codec, self.specs, _places(parts))
        self.outers: list[diloco.Outer] = []
        self.codecs: list[Any] = []
        self.versions = [0 for _ in parts]  # outer steps that made each anchor, P
        self.asking: list[str] = []  # clusters that have requested the run's end
        self._messages = self._message_bytes = 0
        if not is_planned(params):
            self.resume(self.first(params), None)

    def first(self, params: Any) -> dict[str, Any]:
        """Returns `arrays` at step 0: the anchor is a copy of the parameters."""
        parts = diloco.split(params, self._where)
        return {
            "outers": [diloco.begin(self.config, part) for part in parts],
            "codecs": [self.codec.init(spec) for spec in self.specs[:-1]],
        }

    @property
    def described(self) -> dict[str, int]:
        """The messages sent, the bytes of one copy each, and the trained parameters."""
        leaves = jax.tree.leaves([spec["delta"] for spec in self.specs])
        return {
            "messages": self._messages,
            "message_bytes": self._message_bytes,
            "parameters": sum(leaf.size for leaf in leaves),
        }

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that belong into a checkpoint."""
        return {"outers": self.outers, "codecs": self.codecs}

    @property
    def position(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        return {"versions": list(self.versions)}

    def resume(
        self, arrays: Mapping[str, Any], position: Mapping[str, Any] | None
    ) -> None:
        """Resumes from a checkpoint, or begins with `first`, without a `position`."""
        self.outers, self.codecs = list(arrays["outers"]), list(arrays["codecs"])
        if position is not None:
            self.versions = list(position["versions"])

    def outgoing(
        self, step: int, fragment: int, params: Any, is_stopping: bool = False
    ) -> Selected:
        """Encodes this cluster's message after `step`; it may request the run's end."""
        own = diloco.split(params, self._where)[fragment]
        head = messages.Head(step, fragment, self.versions[fragment], int(is_stopping))
        message = {
            "head": np.asarray(head, np.uint32),
            "anchor": self.digest(fragment),
            "delta": diloco.outer_gradient(self.outers[fragment].anchor, own),
        }
        # The codec's state keeps what this message leaves out, such as a residual.
        payload, self.codecs[fragment] = self._encode(message, self.codecs[fragment])
        sent = Selected(payload)
        self._messages += 1
        self._message_bytes += codec_lib.nbytes(sent)
        return sent

    def digest(self, fragment: int) -> np.ndarray:
        """Returns the digest of a fragment's anchor, [32] uint8."""
        anchor = _on_host(self.outers[fragment].anchor)
        return np.frombuffer(diloco.digest(anchor), np.uint8)

    def incoming(
        self, step: int, fragment: int, params: Any, payloads: Sequence[Selected | None]
    ) -> tuple[Any, list[messages.Head]]:
        """Takes the outer step of a round, and mixes the anchor into the parameters.

        `payloads` are R, of all clusters in their order, sent after `step`: this one's
        own as `outgoing` has returned it, None of those that the round goes on without.
        Returns the parameters, and the heads of the messages that there were. Raises
        RoundError, with nothing changed, if one is of another round or fragment, counts
        from another anchor, is not finite, or makes the new anchor so.
        """
        version = self.versions[fragment]
        expected = messages.Head(step, fragment, version)
        where = f"of fragment {fragment} in the round of step {step}"
        found = self._checked(expected, self.digest(fragment), payloads)
        heads = [head for head, _ in found.values()]
        self.asking += [name for name, (head, _) in found.items() if head.is_stopping]
        # Deltas are added in the clusters' order: everywhere to the same bits.
        deltas = [delta for _, delta in found.values()]
        outer = diloco.outer_step(
            self.config,
            self.outers[fragment],
            deltas,
            self._weights(list(found), deltas),
            is_first=version == 0,
        )
        if not diloco.is_finite(outer):
            raise _absurd(where, {name: each for name, (_, each) in found.items()})
        self.outers[fragment] = outer
        self.versions[fragment] += 1
        own = diloco.split(params, self._where)[fragment]
        mixed = diloco.mix(self.config, own, outer.anchor)
        return diloco.replace(params, mixed), heads

    def _weights(
        self, names: Sequence[str], deltas: Sequence[diloco.Fragment]
    ) -> list[float]:
        """Returns the weights of clusters that have sent, by their shares."""
        shares = [self._shares[name] for name in names]
        weights = [each / sum(shares) for each in shares]
        if not self.config.is_robust:
            return weights
        norms = [diloco.norm(_on_host(delta)) for delta in deltas]
        return diloco.robust_weights(weights, norms)

    def _checked(
        self,
        expected: messages.Head,
        digest: np.ndarray,
        payloads: Sequence[Selected | None],
    ) -> dict[str, tuple[messages.Head, diloco.Fragment]]:
        """Returns head and delta of each cluster that has sent, in their order."""
        found = {}
        where = f"of fragment {expected.fragment} in the round of step {expected.step}"
        decode = self._decode[expected.fragment]
        for name, payload in zip(self._clusters, payloads, strict=True):
            if payload is None:
                continue
            message, is_finite = decode(payload.payload)
            delta = message.pop("delta")
            about = jax.device_get(message)
            head = messages.Head(*map(int, about["head"]))
            if (head.step, head.fragment) != (expected.step, expected.fragment):
                raise RoundError(
                    f"{name} sent a delta of fragment {head.fragment} in the round of"
                    f" step {head.step}; expected one {where}"
                )
            if head.version != expected.version:
                raise RoundError(
                    f"{name} sent a delta {where} from version {head.version} of the"
                    f" anchor; {self._own} has version {expected.version}"
                )
            if not np.array_equal(about["anchor"], digest):
                raise RoundError(
                    f"{name} and {self._own} have diverged: their anchors {where},"
                    f" version {expected.version}, differ"
                )
            if not bool(is_finite):
                raise RoundError(f"{name} sent a delta {where} that is not finite")
            found[name] = head, delta
        return found

    def closing(self, step: int) -> Selected:
        """Returns the message after the last round: a digest of all anchors."""
        head = messages.Head(step, len(self.outers), sum(self.versions))
        message = {
            "head": np.asarray(head, np.uint32),
            "anchor": self._digest_of_all(),
            "delta": {},
        }
        state = self.codec.init(self.specs[-1])
        return Selected(self._encode(message, state)[0])

    def close(self, step: int, params: Any, payloads: Sequence[Any]) -> Any:
        """Returns the parameters at the anchors, which all clusters have alike.

        `payloads`: R closing messages in order. Raises RoundError if one has others.
        """
        expected = messages.Head(step, len(self.outers), sum(self.versions))
        self._checked(expected, self._digest_of_all(), payloads)
        for outer in self.outers:
            params = diloco.replace(params, jax.tree.map(jnp.copy, outer.anchor))
        return params

    def _digest_of_all(self) -> np.ndarray:
        parts = {str(f): self.digest(f) for f in range(len(self.outers))}
        return np.frombuffer(diloco.digest(parts), np.uint8)


def is_planned(params: Any) -> bool:
    """Returns True if these are specs of parameters."""
    return isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)


def _on_host(arrays: diloco.Fragment) -> Any:
    return jax.device_get(ranks.everywhere(arrays))


def _absurd(where: str, deltas: Mapping[str, diloco.Fragment]) -> RoundError:
    """Returns the error of an outer step that overflows: who has sent the most."""
    sizes = {name: diloco.largest(delta) for name, delta in deltas.items()}
    first, *rest = sorted(sizes, key=lambda name: -sizes[name])
    others = ", ".join(f"{sizes[name]:.2g} of {name}" for name in rest)
    return RoundError(
        f"{first} sent a delta {where} of up to {sizes[first]:.2g}, with which the"
        f" outer step is not finite; the others are of up to {others or 'none'}"
    )


def _places(parts: Sequence[diloco.Fragment]) -> list[dict[str, Any]] | None:
    """Returns the shardings of fragments, P; None if they are not on a mesh."""
    found = [
        {path: getattr(leaf, "sharding", None) for path, leaf in part.items()}
        for part in parts
    ]
    on_mesh = [
        isinstance(each, jax.sharding.NamedSharding)
        for part in found
        for each in part.values()
    ]
    return found if all(on_mesh) else None


def _compiled(
    codec: codec_lib.Codec,
    specs: Sequence[Any],
    sharding: Sequence[dict[str, Any]] | None,
) -> tuple[Any, list[Any]]:
    """Returns an encoder, and decoders to (message, True if its delta is finite)."""
    everywhere: Any = None
    places: list[Any] = [None for _ in specs]
    if sharding is not None:
        mesh = jax.tree.leaves(sharding)[0].mesh
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        places = [
            {name: everywhere for name in each} | {"delta": part}
            for each, part in zip(specs, [*sharding, {}], strict=True)
        ]
    return _encoder(codec, everywhere), [
        _decoder(codec, *_hashable(spec), *_hashable(place))
        for spec, place in zip(specs, places, strict=True)
    ]


# Cached: replicas of one process, which have one codec, compile each program once.
@functools.cache
def _encoder(codec: codec_lib.Codec, everywhere: Any) -> Any:
    return jax.jit(codec.encode, donate_argnums=1, out_shardings=everywhere)


@functools.cache
def _decoder(
    codec: codec_lib.Codec, spec: Any, of_spec: Any, place: Any, of_place: Any
) -> Any:
    def decode(payload: Any) -> tuple[Any, jax.Array]:
        message, _ = codec.decode(payload, codec.init(of_spec.unflatten(spec)))
        return message, finite.all_finite(message["delta"])

    return jax.jit(decode, out_shardings=(of_place.unflatten(place), None))


def _hashable(tree: Any) -> tuple[tuple[Any, ...], Any]:
    """Returns the leaves of a tree, and its structure."""
    leaves, structure = jax.tree.flatten(tree)
    return tuple(leaves), structure
