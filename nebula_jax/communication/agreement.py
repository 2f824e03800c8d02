"""The format of a channel, on which both ends agree before the first tensor.

Only buffers travel, so both ends must mean the same by them. The listener's Welcome
describes all its channels; the connector compares them with its own, and both sides
end with an error that names the channel and the difference.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from nebula_jax import errors, printable, strict_json
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import selector
from nebula_jax.communication.wire import frames, session

LEAVES_SHOWN = 1000  # of a channel, in a Welcome; a digest covers the others
TREE_SHOWN = 200  # characters of a tree's structure

Description = Mapping[str, Any]  # of a channel; JSON, see `describe`


class Mismatch(errors.NebulaError):
    """A difference between what two clusters are set to do."""


class FormatError(errors.NebulaError):
    """A tree of arrays unlike those that its channel was opened for."""


class Format(NamedTuple):
    """The format of a channel."""

    name: str
    codec: str  # its name
    zstd: int | None  # level
    spec: codec_lib.Spec  # of the arrays
    payloads: tuple[codec_lib.Payload, ...]  # for each option, what it makes of them

    def buffer_sizes(self) -> list[list[int]]:
        """Returns the bytes of each buffer of a tensor, for each option."""
        return [
            [codec_lib.nbytes(leaf) for leaf in jax.tree.leaves(payload)]
            for payload in self.payloads
        ]

    def check(self, arrays: Any) -> None:
        """Raises FormatError unless arrays have the channel's tree, shapes, dtypes."""
        _check(f"channel {self.name}", self.spec, arrays)

    def check_payload(self, selected: selector.Selected) -> None:
        """Raises FormatError unless a payload is what the channel's codec makes."""
        if not 0 <= selected.option < len(self.payloads):
            raise FormatError(
                f"channel {self.name}: option {selected.option} of {self.codec};"
                f" there are {len(self.payloads)}"
            )
        what = f"channel {self.name}, payload of {self.codec}"
        _check(what, self.payloads[selected.option], selected.payload)


class Formats:
    """The formats of all channels of one side, until both sides have compared them."""

    def __init__(self, cluster: str) -> None:
        """Starts without channels; `cluster` is the name of this side."""
        self.sent: list[Format] = []
        self.received: list[Format] = []
        self._cluster, self._is_complete = cluster, False

    def check_open(self, name: str) -> None:
        """Raises session.LocalProtocolError if it is too late to open a channel."""
        if self._is_complete:
            raise session.LocalProtocolError(
                f"channel {name} is opened too late: the clusters have compared their"
                " channels"
            )

    def encoded(self) -> bytes:
        """Returns their description for the Welcome; no channel is opened after it."""
        self._is_complete = True
        return encode(self.sent, self.received)

    def compare(self, described: bytes, peer: str) -> None:
        """Compares them with a peer's Welcome; raises as `compare` and `decode`."""
        self._is_complete = True
        sent, received = decode(described, peer)
        compare([describe(each) for each in self.sent], received, self._cluster, peer)
        compare(sent, [describe(each) for each in self.received], peer, self._cluster)


def format_of(
    name: str, spec: codec_lib.Spec, codec: selector.CodecOrSelector
) -> Format:
    """Returns the format of a channel with these settings.

    Raises errors.SettingsError if the codec has more shapes than a frame can name, or
    does not give back what it is given; at a spec without arrays.
    """
    what, shapes = f"channel {name}", len(selector.as_selector(codec).codecs)
    if shapes > frames.MAX_OPTIONS:
        raise errors.SettingsError(
            f"{what}: its codec has {shapes} shapes, of which at most"
            f" {frames.MAX_OPTIONS} can be"
        )
    if not jax.tree.leaves(spec):
        raise errors.SettingsError(f"{what}: there is no array in what is to cross")
    payloads = selector.fitted(what, codec, spec)
    if codec != codec_lib.identity() and codec.zstd is None:
        codec_lib.warn_unless_smaller(what, codec.name, spec, payloads)
    return Format(name, codec.name, codec.zstd, spec, payloads)


def describe(made: Format) -> Description:
    """Describes a channel in JSON: name, codec, zstd, cut tree and leaves, digest."""
    tree, leaves = codec_lib.tree_text(made.spec), codec_lib.leaf_texts(made.spec)
    payloads = [
        (codec_lib.tree_text(each), codec_lib.leaf_texts(each))
        for each in made.payloads
    ]
    whole = repr((made.name, made.codec, made.zstd, tree, leaves, payloads))
    return {
        "name": made.name,
        "codec": made.codec,
        "zstd": made.zstd,
        "tree": tree[:TREE_SHOWN],
        "leaves": leaves[:LEAVES_SHOWN],
        "digest": hashlib.sha256(whole.encode()).hexdigest(),
    }


def encode(sent: Sequence[Format], received: Sequence[Format]) -> bytes:
    """Encodes the description of all of a side's channels, for its Welcome."""
    sides = [[describe(each) for each in side] for side in (sent, received)]
    shown = LEAVES_SHOWN
    while True:
        data = json.dumps(sides, separators=(",", ":")).encode()
        if len(data) <= frames.MAX_WELCOME_BYTES or not shown:
            return data
        shown //= 2
        sides = [
            [{**each, "leaves": each["leaves"][:shown]} for each in side]
            for side in sides
        ]


def decode(data: bytes, peer: str) -> tuple[list[Description], list[Description]]:
    """Decodes what `encode` made of channels; raises session.RemoteProtocolError."""
    try:
        sent, received = strict_json.loads(data)
        for each in (*sent, *received):
            texts = [each[key] for key in ("name", "codec", "tree", "digest")]
            texts += each["leaves"]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError
            if each["zstd"] is not None and type(each["zstd"]) is not int:
                raise TypeError
        return list(sent), list(received)
    except (ValueError, KeyError, TypeError):
        raise session.RemoteProtocolError(
            f"{peer} sent a description of its channels that cannot be read"
        ) from None


def compare(
    senders: Sequence[Description],
    receivers: Sequence[Description],
    sender: str,
    receiver: str,
) -> None:
    """Raises Mismatch, with the first difference, unless two sides' channels agree."""
    for here, there in zip(senders, receivers, strict=False):
        if here["digest"] != there["digest"]:
            raise Mismatch(_difference(here, there, sender, receiver))
    if len(senders) != len(receivers):
        raise Mismatch(
            f"{sender} sends on {_names(senders)}; {receiver} receives on"
            f" {_names(receivers)}"
        )


def _difference(here: Description, there: Description, sender: str, other: str) -> str:
    """Returns the difference in words, the plainest one first."""
    name = printable.line(here["name"])
    if here["name"] != there["name"]:
        # The name may be a setting, such as `inner_steps=6`.
        return f"{sender} has {name}; {other} has {printable.line(there['name'])}"
    channel = f"channel {name}:"
    for key in ("codec", "zstd"):
        if here[key] != there[key]:
            return (
                f"{channel} {sender} has {key} {printable.line(here[key])},"
                f" {other} has {key} {printable.line(there[key])}"
            )
    for pair in itertools.zip_longest(here["leaves"], there["leaves"]):
        if pair[0] != pair[1]:
            one, two = (printable.line(each or codec_lib.NO_LEAF) for each in pair)
            return f"{channel} {sender} has {one}, {other} has {two}"
    if here["tree"] != there["tree"]:
        return (
            f"{channel} {sender} has the tree {printable.line(here['tree'])},"
            f" {other} has {printable.line(there['tree'])}"
        )
    return (
        f"{channel} {sender} and {other} differ in what its codec makes of the"
        " arrays, or beyond the leaves that a description shows"
    )


def _names(channels: Sequence[Description]) -> str:
    names = ", ".join(each["name"] for each in channels)
    count = f"{len(channels)} channel{'s' * (len(channels) != 1)}"
    return f"{count} ({printable.line(names)})" if channels else count


def _check(what: str, spec: Any, arrays: Any) -> None:
    expected, structure = jax.tree.flatten(spec)
    got, found = jax.tree.flatten(arrays)
    is_alike = bool(structure == found)  # type: ignore[operator]
    if is_alike and all(
        (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
        == (like.shape, like.dtype)
        for like, leaf in zip(expected, got, strict=True)
    ):
        return
    if differing := codec_lib.difference(spec, arrays):
        raise FormatError(f"{what}: expected {differing[0]}, got {differing[1]}")
    trees = [printable.line(codec_lib.tree_text(each)) for each in (spec, arrays)]
    raise FormatError(f"{what}: expected the tree {trees[0]}, got {trees[1]}")
