"""Both ends of a channel mean the same by its bytes, or part in words."""

import json
import re
import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_halves

from nebula_jax import errors
from nebula_jax.communication import agreement, codecs, loopback, selector
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import frames, session


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


class Batch(NamedTuple):
    h: jax.Array
    mask: jax.Array


TREE = {"h": array(4, 8), "mask": array(4, dtype=jnp.bool_)}
WIDE = {f"layer_{number:05}": array(2) for number in range(1100)}
ONE_OF_WIDE = WIDE | {"layer_01099": array(3)}

SEED_0, SEED_1 = "hadamard(256, 0)|fp16", "hadamard(256, 1)|fp16"
AB, AC = ({"a": array(4), other: array(4)} for other in "bc")
# Two ends of a channel, (spec, codec), of as many bytes; and how they differ.
DIFFERENT = [
    ((array(16, 4), ""), (array(4, 16), ""), "float32[16, 4]", "float32[4, 16]"),
    ((array(4, dtype=jnp.int32), ""), (array(4), ""), "int32[4]", "float32[4]"),
    ((array(4, 8), "fp16"), (array(4, 8), "bf16"), "codec fp16", "codec bf16"),
    (
        (array(4, 8), SEED_0),
        (array(4, 8), SEED_1),
        f"codec {SEED_0}",
        f"codec {SEED_1}",
    ),
    ((array(4), "zstd(3)"), (array(4), "zstd(4)"), "zstd 3", "zstd 4"),
    (
        (TREE, ""),
        (TREE | {"h": array(8, 4)}, ""),
        "['h'] float32[4, 8]",
        "['h'] float32[8, 4]",
    ),
    ((AB, ""), (AC, ""), "['b'] float32[4]", "['c'] float32[4]"),
    (
        ((array(4), array(4)), ""),
        ([array(4), array(4)], ""),
        "the tree PyTreeDef((*, *))",
        "PyTreeDef([*, *])",
    ),
    ((TREE, ""), (TREE | {"n": array()}, ""), "no such leaf", "['n'] float32[]"),
]


def opened(make, name, side):
    spec, codec = side
    return make(name, spec, codecs.from_string(codec))


@pytest.mark.parametrize(("here", "there", "one", "two"), DIFFERENT)
def test_every_difference_of_a_channel_is_named(here, there, one, two):
    loop = loopback.Loopback()
    opened(loop.sender, "first", (array(1), ""))
    opened(loop.receiver, "first", (array(1), ""))
    opened(loop.receiver, "gradient", there)
    words = f"channel gradient: the sending end has {one}, the receiving end has {two}"
    with pytest.raises(agreement.Mismatch, match=re.escape(words)):
        opened(loop.sender, "gradient", here)


def test_codecs_without_a_name_differ_by_what_they_make():
    folded = codec_lib.stateless(lambda x: x.reshape(4, -1), lambda x: x.reshape(-1))
    cast = codec_lib.stateless(lambda x: x.astype("float16"), lambda x: x.astype("f4"))
    loop = loopback.Loopback()
    loop.sender("h", array(8), folded)
    words = "channel h: .* differ in what its codec makes of the arrays"
    with pytest.raises(agreement.Mismatch, match=words):
        loop.receiver("h", array(8), cast)


def meet(here, there):
    """Opens (end, name, (spec, codec)) on both halves; returns the errors of both."""

    def error(link, channels, begin):
        try:
            with link:
                for end, name, side in channels:
                    opened(getattr(link, end), name, side)
                begin()
        except errors.NebulaError as error:
            return error

    with two_halves.met() as (front, back):

        def welcome():
            back.welcome(0)
            back.wait_for_step(1)

        return two_halves.both(
            lambda: error(back, there, welcome),
            lambda: error(front, here, lambda: front.wait_for_welcome(10.0)),
        )


@pytest.mark.parametrize(("number", "direction"), [(0, "up"), (2, "down")])
def test_clusters_compare_their_channels_before_the_first_tensor(number, direction):
    here, there, one, two = DIFFERENT[number]
    alike = (TREE, "fp16|zstd")
    ends = ("sender", "receiver") if direction == "up" else ("receiver", "sender")
    front, back = meet(
        [("sender", "tokens", alike), (ends[0], "gradient", here)],
        [("receiver", "tokens", alike), (ends[1], "gradient", there)],
    )
    words = f"front has {one}, back has {two}"
    if direction == "down":
        words = f"back has {two}, front has {one}"
    assert isinstance(front, agreement.Mismatch)
    assert str(front) == f"channel gradient: {words}"
    assert isinstance(back, session.PeerAborted)
    assert str(back) == f"front gave up: channel gradient: {words}"


@pytest.mark.parametrize(
    ("sent", "received", "words"),
    [
        (
            ["tokens", "more"],
            ["tokens"],
            "front sends on 2 channels (tokens, more); back receives on 1 channel"
            " (tokens)",
        ),
        (["a", "b"], ["b", "a"], "front has a; back has b"),
    ],
)
def test_channels_of_one_side_alone_or_in_another_order_are_named(
    sent, received, words
):
    front, _ = meet(
        [("sender", name, (TREE, "")) for name in sent],
        [("receiver", name, (TREE, "")) for name in received],
    )
    assert str(front) == words


def test_a_channel_cannot_be_opened_after_the_others_were_compared():
    with two_halves.met() as (front, back):
        back.welcome(0)
        front.wait_for_welcome(10.0)
        for link in (front, back):
            for make in (link.sender, link.receiver):
                with pytest.raises(session.LocalProtocolError, match="h is opened too"):
                    make("h", array(2), codecs.identity())
            link.abort("done")


def formats(spec):
    return [agreement.format_of("h", spec, codecs.identity())]


def test_a_description_has_a_bounded_size_and_still_shows_every_difference(monkeypatch):
    limit = 10_000
    with monkeypatch.context() as patch:
        patch.setattr(frames, "MAX_WELCOME_BYTES", limit)
        assert limit / 3 < len(agreement.encode(formats(WIDE), formats(WIDE))) <= limit
    sent, _ = agreement.decode(agreement.encode(formats(WIDE), []), "a")
    other, _ = agreement.decode(agreement.encode(formats(ONE_OF_WIDE), []), "b")
    agreement.compare(sent, sent, "a", "b")
    with pytest.raises(agreement.Mismatch, match=r"channel h: .* beyond the leaves"):
        agreement.compare(sent, other, "a", "b")


def test_a_description_is_the_same_in_every_process():
    def codec():
        return codec_lib.stateless(
            lambda x: {"x": (x,)}, lambda payload: payload["x"][0]
        )

    one, two = (
        agreement.encode([agreement.format_of("h", Batch(*TREE.values()), codec())], [])
        for _ in range(2)
    )
    assert one == two
    assert b"0x" not in one


GOOD = agreement.describe(formats(TREE)[0])


STRANGE = [
    *(None, 5, [], [[], [], []], [[GOOD]], [[GOOD], [5]]),
    *([[GOOD | {"name": 5}], []], [[GOOD | {"zstd": "3"}], []]),
    *([[GOOD | {"leaves": [5]}], []], [[GOOD | {"leaves": None}], []]),
    [[{key: GOOD[key] for key in GOOD if key != "digest"}], []],
]


@pytest.mark.parametrize(
    "data",
    [*(json.dumps(each).encode() for each in STRANGE), b"", b"\xff", b"[" * 60_000],
)
def test_a_strange_description_is_refused(data):
    words = "back sent a description of its channels that cannot be read"
    with pytest.raises(session.RemoteProtocolError, match=words):
        agreement.decode(data, "back")


SENT = {"h": np.zeros((4, 8), np.float32), "mask": np.ones(4, np.bool_)}
OF_H = "channel h: expected ['h'] float32[4, 8], got "


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (SENT | {"h": SENT["h"].T}, f"{OF_H}['h'] float32[8, 4]"),
        (SENT | {"h": SENT["h"].astype(np.int32)}, f"{OF_H}['h'] int32[4, 8]"),
        ({"h": SENT["h"]}, "expected ['mask'] bool[4], got no such leaf"),
        (SENT | {"n": 1}, "expected no such leaf, got ['n'] int"),
        (SENT | {"h": 0.5}, f"{OF_H}['h'] float"),
        (Batch(**SENT), f"{OF_H}.h float32[4, 8]"),
    ],
)
def test_a_sender_refuses_what_its_channel_was_not_opened_for(arrays, words):
    sender = loopback.Loopback().sender("h", TREE, codecs.identity())
    with pytest.raises(agreement.FormatError, match=re.escape(words)):
        sender.send(1, arrays)
    sender.send(1, SENT)


def test_a_sender_refuses_a_payload_of_another_codec():
    sender = loopback.Loopback().sender("h", array(4), codecs.fp16())
    good, bad = (
        codec.encode(jnp.ones(4), ())[0] for codec in (codecs.fp16(), codecs.bf16())
    )
    words = r"payload of fp16: expected .* float16\[4\], got .* bfloat16\[4\]"
    with pytest.raises(agreement.FormatError, match=words):
        sender.send_payload(1, selector.Selected(bad, 0))
    with pytest.raises(agreement.FormatError, match="option 1 of fp16; there are 1"):
        sender.send_payload(1, selector.Selected(good, 1))
    sender.send_payload(1, selector.Selected(good, 0))


@pytest.mark.parametrize("kind", ["sender", "receiver"])
def test_a_codec_of_more_shapes_than_a_frame_can_name_opens_no_channel(
    kind, monkeypatch
):
    """A frame has one byte for them, of which one number ends a step."""
    most = frames.LAYOUTS[frames.Tensor].pack(0, 1, 0, frames.MAX_OPTIONS - 1)
    assert frames.LAYOUTS[frames.Tensor].unpack(most)[-1] == frames.STEP_END - 1
    with pytest.raises(struct.error):
        frames.LAYOUTS[frames.Tensor].pack(0, 1, 0, frames.STEP_END + 1)
    monkeypatch.setattr(frames, "MAX_OPTIONS", 3)
    end = getattr(loopback.Loopback(), kind)
    three = selector.as_selector(codecs.fp16())._replace(codecs=(codecs.fp16(),) * 3)
    end("h", array(4), three)
    more = codecs.from_step(2, three)
    words = "channel k: its codec has 4 shapes, of which at most 3"
    with pytest.raises(errors.SettingsError, match=words):
        end("k", array(4), more)
