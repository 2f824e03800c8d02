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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import ranks, selector
from nebula_jax.parallel.local_steps import (
    delta_codecs,
    delta_control,
    round_messages,
    round_tokens,
)
from nebula_jax.training import local_steps


class RoundError(errors.NebulaError):
    """A message that cannot be of this round; the text names round and fragment."""


class _Message(NamedTuple):
    """A message that has been checked."""

    head: round_messages.Head
    delta: local_steps.Fragment
    figures: Any
    """For the choice of a codec; None without."""


class Member:
    """One cluster's part in the rounds; also of those that one process simulates.

    outers: P states that all clusters have alike.
    codecs: P states of the codec, this cluster's own.
    Both are arrays of the checkpoint; `position` is the rest.
    """

    def __init__(
        self,
        config: local_steps.Config,
        codec: selector.CodecOrSelector,
        clusters: Sequence[str],
        own: str,
        shapes: Any,
        sharding: Any = None,
        weights: str = "equal",
        choice: delta_control.Choice | None = None,
    ) -> None:
        """Begins without arrays: `first` makes those of step 0.

        Args:
          config: of the run.
          codec: of the deltas; with `choice` the ladder that it chooses from.
          clusters: names of all, in the order in which their deltas are added.
          own: name of this one.
          shapes: specs of the parameters that train.
          sharding: of these, on this cluster's devices; None for one device.
          weights: of the clusters: `equal`, or by the `tokens` of a round.
          choice: of the codec; None if there is one.

        Raises:
          ValueError: as `local_steps.split` and `delta_codecs.check_codec`.
        """
        for each in selector.variants(codec):
            delta_codecs.check_codec(each)
        self.config, self._clusters, self._own = config, list(clusters), own
        self._by_tokens = weights == "tokens"
        parts = local_steps.split(shapes, config.fragments)
        self.fingerprint = local_steps.fingerprint(parts)
        self.choice = choice
        self.specs = [
            *(round_messages.spec(part, choice is not None) for part in parts),
            round_messages.spec({}),
        ]
        """P + 1, of the messages; that of the last one, at the end, has no delta."""
        self.codec = codec
        """The codec of the messages."""
        places: list[Any] = [None] * len(self.specs)
        everywhere = None
        if sharding is not None:
            everywhere = _replicated(sharding)
            placed = (*local_steps.split(sharding, config.fragments), {})
            places = [
                {name: everywhere for name in spec} | {"delta": part}
                for spec, part in zip(self.specs, placed, strict=True)
            ]
        self._coders = [
            delta_codecs.Coder(each, self.specs, places, everywhere)
            for each in selector.variants(codec)
        ]
        self.outers: list[local_steps.Outer] = []
        self.codecs: list[Any] = []
        # Of each fragment, the message that is under way.
        self._sent: list[selector.Selected | None] = [None for _ in parts]
        self.versions = [0 for _ in parts]
        """The outer steps that made each fragment's anchor, P."""
        self._tokens = round_tokens.Tokens([0 for _ in parts])

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
        if self.choice is not None:
            self.choice.go_on(None if position is None else position["tape"])
        if position is not None:
            self.versions = list(position["versions"])
        self._sent = [None for _ in self.versions]
        counts = [0] * len(self.versions) if position is None else position["tokens"]
        self._tokens = round_tokens.Tokens(counts)

    @property
    def position(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        return {
            "versions": list(self.versions),
            "tokens": self._tokens.counts(),
            **({} if self.choice is None else {"tape": self.choice.rows}),
        }

    def took(self, tokens: Any) -> None:
        """Counts the tokens of an inner step, [] integers on any device."""
        self._tokens.took(tokens)

    def outgoing(
        self,
        step: int,
        fragment: int,
        params: Any,
        milliseconds: int = 0,
        is_stopping: bool = False,
    ) -> selector.Selected:
        """Returns this cluster's message of a round, encoded.

        Args:
          step: after which it is sent.
          fragment: its number.
          params: of this cluster, those that train.
          milliseconds: as in `Head`.
          is_stopping: True to request the end of the run.
        """
        anchor = self.outers[fragment].anchor
        own = local_steps.split(params, self.config.fragments)[fragment]
        most = round_messages.MOST
        head = round_messages.Head(
            *(step, fragment, self.versions[fragment]),
            min(self._tokens.send(fragment), most),
            *(min(milliseconds, most), int(is_stopping)),
        )
        message = {
            "head": np.asarray(head, np.uint32),
            "anchor": self.digest(fragment),
            "delta": local_steps.outer_gradient(anchor, own),
        }
        number = self._option()
        coder = self._coders[number]
        if self.choice is not None:
            similarity = float(coder.similarity(message["delta"]))
            message["figures"] = self.choice.figures(self._number(), similarity)
        payload, self.codecs[fragment] = coder.encode(message, self.codecs[fragment])
        self._sent[fragment] = sent = selector.Selected(payload, number)
        return sent

    def _number(self) -> int:
        """Returns the number of the next round to be applied, counted from 1."""
        return 1 + self._rounds()

    def _option(self) -> int:
        """Returns the number of the codec of that round."""
        return 0 if self.choice is None else self.choice.option(self._number())

    def digest(self, fragment: int) -> np.ndarray:
        """Returns the digest of a fragment's anchor, [32] uint8."""
        anchor = ranks.everywhere(self.outers[fragment].anchor)
        return np.frombuffer(local_steps.digest(jax.device_get(anchor)), np.uint8)

    def incoming(
        self,
        step: int,
        fragment: int,
        params: Any,
        payloads: Sequence[selector.Selected | None],
    ) -> tuple[Any, list[round_messages.Head]]:
        """Takes the outer step of a round, and mixes the anchor into the parameters.

        Args:
          step: after which the messages were sent.
          fragment: their number.
          params: of this cluster now, those that train.
          payloads: R, of all clusters in their order, this one's own too, as `outgoing`
            has returned it; None of those that the round goes on without.

        Returns:
          The parameters, and the heads of the messages that there were.

        Raises:
          RoundError: if one is of another round or fragment, counts from another
            anchor, or is not finite.
        """
        version, digest = self.versions[fragment], self.digest(fragment)
        expected = round_messages.Head(step, fragment, version, 0)
        messages = self._checked(expected, self._option(), digest, payloads)
        heads = [each.head for each in messages.values()]
        sent = {name: each.delta for name, each in messages.items()}
        self._write(messages)
        tokens = [head.tokens if self._by_tokens else 1 for head in heads]
        outer = local_steps.outer_step(
            *(self.config, self.outers[fragment], list(sent.values())),
            local_steps.weights_of(tokens),
            is_first=version == 0,
        )
        before, self.outers[fragment] = self.outers[fragment].anchor, outer
        self.versions[fragment] += 1
        # After a restart, the round may have a message of the process before: what was
        # in it has never been in these parameters.
        ours = payloads[self._clusters.index(self._own)]
        is_in = ours is not None and ours is self._sent[fragment]
        self._sent[fragment] = None
        # Of what the parameters had learned, `mix` leaves a share.
        kept = 1.0 if self.config.keeps_unsent else self.config.mixing
        self._tokens.close(fragment, is_in, kept)
        own = local_steps.split(params, self.config.fragments)[fragment]
        if self.config.keeps_unsent:
            counted = sent[self._own] if is_in else None
            after = local_steps.follow(own, counted, before, outer.anchor)
        else:
            after = local_steps.mix(self.config, own, outer.anchor)
        return local_steps.replace(params, after), heads

    def _write(self, messages: Mapping[str, "_Message"]) -> None:
        """Writes what the messages of a round report of their codec onto the tape."""
        if self.choice is not None:
            figures = [each.figures for each in messages.values()]
            self.choice.write(self._number(), figures)

    def _checked(
        self,
        expected: round_messages.Head,
        option: int,
        digest: np.ndarray,
        payloads: Sequence[selector.Selected | None],
    ) -> dict[str, "_Message"]:
        """Returns those messages that there are, by name, in the clusters' order."""
        found = {}
        where = f"of fragment {expected.fragment} in the round of step {expected.step}"
        for name, payload in zip(self._clusters, payloads, strict=True):
            if payload is None:
                continue
            if payload.option != option:
                raise RoundError(
                    f"{name} sent a delta {where} by codec {payload.option} of the"
                    f" ladder; {self._own} expects codec {option}"
                )
            decode = self._coders[option].decode[expected.fragment]
            message, is_finite = decode(payload.payload)
            delta = message.pop("delta")
            about = jax.device_get(message)
            head = round_messages.Head(*map(int, about["head"]))
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
            if "figures" in about:
                try:
                    delta_control.check(about["figures"])
                except ValueError as error:
                    raise RoundError(f"{name} sent a delta {where} with {error}") from (
                        None
                    )
            found[name] = _Message(head, delta, about.get("figures"))
        return found

    def closing(self, step: int) -> selector.Selected:
        """Returns the message after the last round: a digest of all anchors.

        Args:
          step: the last one.
        """
        end = len(self.outers)
        message = {
            "head": np.asarray(
                round_messages.Head(step, end, self._rounds(), 0), np.uint32
            ),
            "anchor": self._digest_of_all(),
            "delta": {},
        }
        state = self.codec.init(self.specs[-1])
        return selector.Selected(self._coders[0].encode(message, state)[0])

    def close(self, step: int, params: Any, payloads: Sequence[Any]) -> Any:
        """Returns the parameters at the anchors, which all clusters have alike.

        Args:
          step: the last one.
          params: of this cluster, those that train.
          payloads: R, closing messages of all clusters in their order.

        Raises:
          RoundError: if some cluster has others.
        """
        expected = round_messages.Head(step, len(self.outers), self._rounds(), 0)
        self._checked(expected, 0, self._digest_of_all(), payloads)
        for outer in self.outers:
            params = local_steps.replace(params, jax.tree.map(jnp.copy, outer.anchor))
        return params

    def _rounds(self) -> int:
        return sum(self.versions)

    def _digest_of_all(self) -> np.ndarray:
        parts = {str(f): self.digest(f) for f in range(len(self.outers))}
        return np.frombuffer(local_steps.digest(parts), np.uint8)


def _replicated(sharding: Any) -> jax.sharding.NamedSharding:
    """Returns the sharding of a copy on every device of the mesh."""
    mesh = jax.tree.leaves(sharding)[0].mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
