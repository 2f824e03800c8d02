"""Rounds that go on without clusters that are late or gone: a hub and its leaves.

The hub alone decides which clusters a round has. Every other cluster, a leaf, follows
what it sends, in order, as a log:

    delta p of k   a message of the round, of a cluster that was there in time
    verdict        the round is closed: the clusters that are in it
    anchor p       the state of fragment p, for a leaf that has missed rounds; of all
                   fragments, and then a verdict that there is nothing before them

So all compute the same anchors from the same messages; digests prove it in the next
round. R clusters, P fragments.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import arrivals, channels, selector
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import frames
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.training import diloco

IN_FLIGHT = frames.MAX_STEP  # of a Welcome to a leaf that is to wait for the state

EndT = TypeVar("EndT", channels.Sender, channels.Receiver)


class LeftOut(errors.PeerAbsent):
    """The end of a run that a cluster was too far behind to have a part in."""


class TooFew(errors.PeerAbsent):
    """The end of a run of which fewer clusters than the quorum are left."""


class Verdict(NamedTuple):
    """An entry of the log; integers from 0 to 2^32 - 1."""

    is_state: int  # 1 if all fragments' states come with it, 0 if it closes a round
    after: int  # the hub's step as it applied the round, or the last before states
    step: int  # after which messages were sent: with the fragment it names the round
    fragment: int  # P for the closing messages, the last entry of a run
    version: int  # outer steps that made the anchor before it
    is_last: int = 0  # 1 for the rounds at the end of a run


class Entry(NamedTuple):
    """A verdict, and what comes with it."""

    verdict: Verdict
    members: tuple[bool, ...]  # R, True for those in the round; all False with states


def spec_of_entry(clusters: int) -> dict[str, Any]:
    """Returns the specs of an entry's arrays, for its channel."""
    return {
        "verdict": jax.ShapeDtypeStruct((len(Verdict._fields),), jnp.uint32),
        "members": jax.ShapeDtypeStruct((clusters,), jnp.bool_),
    }


def arrays_of_entry(entry: Entry) -> dict[str, Any]:
    """Returns an entry as arrays of its spec."""
    return {
        "verdict": np.asarray(entry.verdict, np.uint32),
        "members": np.asarray(entry.members, np.bool_),
    }


def entry_of_arrays(arrays: Any) -> Entry:
    """Returns the entry that `arrays_of_entry` made arrays of."""
    verdict = Verdict(*map(int, arrays["verdict"]))
    return Entry(verdict, tuple(map(bool, arrays["members"])))


def check(verdict: Verdict, config: diloco.Config, last: int) -> None:
    """Raises ValueError if a hub that ends at `last` cannot have sent a verdict."""
    is_state, after, step, fragment, _, is_last = verdict
    if is_state > 1 or is_last > 1:
        raise ValueError(f"is_state={is_state}, is_last={is_last}")
    if after > last:
        raise ValueError(f"after step {after}; the run has {last} steps")
    if is_state:
        return
    allowed: list[tuple[int, int | None]]
    if is_last:
        allowed = [*config.last_rounds(after), (after, config.fragments)]
    else:
        allowed = [(after - config.delay, config.applied_after(after))]
    if (step, fragment) not in allowed:
        raise ValueError(
            f"fragment {fragment} in the round of step {step}, applied after step"
            f" {after}"
        )


def spec_of_state(member: member_lib.Member, fragment: int) -> dict[str, Any]:
    """Returns the specs of a fragment's whole state, for its channel.

    `about`, [2] uint32: the version of the anchor, and the step after which the
    messages of its latest round were sent; `outer`, a `diloco.Outer`.
    """
    begin = functools.partial(diloco.begin, member.config)
    return {
        "about": jax.ShapeDtypeStruct((2,), jnp.uint32),
        "outer": jax.eval_shape(begin, member.specs[fragment]["delta"]),
    }


def check_states(states: Sequence[Any], after: int) -> None:
    """Raises ValueError unless P states, on the host, can be those of a run."""
    versions, closed = np.array([state["about"] for state in states]).T.tolist()
    # A step closes one round at most, but the last one as many as there are fragments.
    if sum(versions) > after + len(states) or max(closed) > after:
        raise ValueError(
            f"versions {versions}, rounds of steps {closed}, after step {after}"
        )
    for leaf in jax.tree.leaves([state["outer"] for state in states]):
        arrivals.check_finite(leaf)


class Down(NamedTuple, Generic[EndT]):
    """One end of the channels from the hub to a leaf."""

    deltas: dict[str, list[EndT]]
    """Cluster -> P + 1, for its messages by fragment; the last one is for the closing
    message. The leaf's own are there for one that has rejoined: what its former
    process sent is still in the round."""
    verdicts: EndT
    states: list[EndT]  # P


Opens = Callable[[str, codec_lib.Spec, selector.CodecOrSelector], EndT]
"""The method `sender` or `receiver` of a link."""


def open_down(
    opens: Opens[EndT], member: member_lib.Member, clusters: Sequence[str]
) -> Down[EndT]:
    """Opens an end of the channels from the hub to a leaf by a method of its link."""
    identity = codec_lib.identity()
    return Down(
        {name: open_up(opens, member, name) for name in clusters},
        opens("verdict", spec_of_entry(len(clusters)), identity),
        [
            opens(f"anchor {each}", spec_of_state(member, each), identity)
            for each in range(member.config.fragments)
        ],
    )


def open_up(opens: Opens[EndT], member: member_lib.Member, origin: str) -> list[EndT]:
    """Opens one end of the channels for a cluster's messages, P + 1."""
    return [
        opens(f"delta {number} of {origin}", spec, member.codec)
        for number, spec in enumerate(member.specs)
    ]


def nbytes(ends: Sequence[channels.Sender]) -> int:
    """Returns the bytes of a tensor on each of the channels, at most and together."""
    sizes = [size for each in ends for size in each.format.buffer_sizes()[0]]
    table = np.dtype(np.uint64).itemsize  # an entry of zstd's, with a checksum a tensor
    return sum(sizes) + table * (len(sizes) + len(ends))
