"""Rounds of local steps: clusters stay alike, and refuse what is of another anchor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from quorum_star import CONFIG, NAMES, params, parts

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.parallel.local_steps import member, messages
from nebula_jax.parallel.local_steps import settings as settings_lib
from nebula_jax.training import diloco


def members(codec="", config=CONFIG):
    given = dataclasses.asdict(config) | {"codec": codec}
    settings = settings_lib.Settings(**given)
    return [member.Member(settings, NAMES, name, params()) for name in NAMES]


def moved(seed: int):
    """Returns parameters after some inner steps of a cluster."""
    return jax.tree.map(lambda a, b: a + 0.1 * b, params(), params(seed))


def three():
    """Returns parameters that the three clusters have come to."""
    return [moved(1), moved(2), moved(3)]


def table(own):
    """Returns a leaf of fragment 0, of parameters or of a member's anchor."""
    if isinstance(own, member.Member):
        return own.outers[0].anchor["embeddings/table"]
    return own["embeddings"]["table"]


def sent(group, copies, step=4, fragment=0):
    return [
        each.outgoing(step, fragment, own)
        for each, own in zip(group, copies, strict=True)
    ]


def received(group, copies, payloads, step=4, fragment=0):
    return [
        each.incoming(step, fragment, own, payloads)[0]
        for each, own in zip(group, copies, strict=True)
    ]


def a_round(group, copies, step=4, fragment=0):
    payloads = sent(group, copies, step, fragment)
    return received(group, copies, payloads, step, fragment)


@pytest.mark.parametrize("codec", ["int8(row)", "error_feedback(int4(8)|fp16)"])
def test_all_clusters_come_to_the_same_bits(codec):
    group = members(codecs.from_string(codec))
    copies = three()
    for step, fragment in [(2, 1), (4, 0), (6, 1), (8, 0)]:
        copies = a_round(group, copies, step, fragment)
        digests = {each.digest(fragment).tobytes() for each in group}
        assert len(digests) == 1
    assert not np.array_equal(
        copies[0]["encoder"]["layer_0"]["kernel"],
        copies[1]["encoder"]["layer_0"]["kernel"],
    )
    closing = [each.closing(8) for each in group]
    ends = [
        each.close(8, own, closing) for each, own in zip(group, copies, strict=True)
    ]
    trees.assert_same(ends[0], ends[1])


def test_one_cluster_cannot_move_the_others_far():
    """Its delta counts as one of the median norm; everywhere to the same bits."""
    config = dataclasses.replace(CONFIG, learning_rate=1.0, momentum=0.0)
    moves = {}
    for is_robust in (False, True):
        group = members(config=dataclasses.replace(config, is_robust=is_robust))
        before = diloco.norm(group[0].outers[0].anchor)
        wild = jax.tree.map(lambda leaf: leaf + 1e4, params())
        a_round(group, [moved(1), moved(2), wild])
        assert len({each.digest(0).tobytes() for each in group}) == 1
        moves[is_robust] = diloco.norm(group[0].outers[0].anchor) / before
    assert moves[False] > 1000
    assert moves[True] < 1.2


def test_rounds_are_outer_steps_on_what_was_received():
    config = diloco.Config(inner_steps=4, fragments=2, delay=1, momentum=0.9)
    codec, after = codecs.int8("row"), three()
    group, expected = members(codec, config), diloco.begin(config, parts(params())[0])
    for step in (4, 8):
        copies, deltas = after, []
        for own in copies:
            delta = diloco.outer_gradient(expected.anchor, parts(own)[0])
            payload, _ = codec.encode(delta, ())
            deltas.append(codec.decode(payload, ())[0])
        expected = diloco.outer_step(
            config, expected, deltas, [1 / 3] * 3, is_first=step == 4
        )
        after = a_round(group, copies, step)
    trees.assert_same(group[1].outers[0].anchor, expected.anchor)
    mixed = diloco.mix(config, parts(copies[1])[0], expected.anchor)
    assert np.array_equal(table(after[1]), mixed["embeddings/table"])
    # The other fragment is as it was.
    kernel = after[1]["encoder"]["layer_1"]["kernel"]
    assert np.array_equal(kernel, copies[1]["encoder"]["layer_1"]["kernel"])


def test_a_member_goes_on_from_what_was_saved():
    made = codecs.from_string("error_feedback(int4(8)|fp16)")
    group, again = members(made), members(made)
    copies = three()
    copies = a_round(group, copies, 2, 1)
    for each, old in zip(again, group, strict=True):
        each.resume(jax.tree.map(jnp.copy, old.arrays), old.position)
    straight = a_round(group, copies, 4, 0)
    resumed = a_round(again, copies, 4, 0)
    trees.assert_same(straight, resumed)


def altered(payload, field: str, value: int):
    head = np.array(payload["head"])
    head[messages.Head._fields.index(field)] = value
    return {**payload, "head": head}


def infinite(payload):
    delta = jax.tree.map(lambda leaf: leaf * np.inf, payload["delta"])
    return {**payload, "delta": delta}


ROUND = "of fragment {} in the round of step {}"
HERE, EXPECTED = ROUND.format(0, 4), f"; expected one {ROUND.format(0, 4)}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda payload: altered(payload, "version", 3),
            f" sent a delta {HERE} from version 3 of the anchor; cluster:0 has version"
            " 0",
        ),
        (
            lambda payload: altered(payload, "step", 8),
            f" sent a delta {ROUND.format(0, 8)}{EXPECTED}",
        ),
        (
            lambda payload: altered(payload, "fragment", 1),
            f" sent a delta {ROUND.format(1, 4)}{EXPECTED}",
        ),
        (
            lambda payload: {**payload, "anchor": payload["anchor"] ^ 1},
            f" and cluster:0 have diverged: their anchors {HERE}, version 0, differ",
        ),
        (infinite, f" sent a delta {HERE} that is not finite"),
    ],
    ids=["version", "step", "fragment", "anchor", "infinite"],
)
def test_what_is_of_no_such_round_is_refused(change, reason):
    group, copies = members(), three()
    payloads = sent(group, copies)
    payloads[1] = selector.Selected(change(payloads[1].payload))
    before = group[0].digest(0).tobytes()
    with pytest.raises(member.RoundError, match=f"^cluster:1{reason}$"):
        group[0].incoming(4, 0, copies[0], payloads)
    assert group[0].digest(0).tobytes() == before


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_delta_that_makes_the_anchor_infinite_names_its_sender(momentum):
    """Finite itself: else the next round would blame who has done nothing."""
    config = dataclasses.replace(CONFIG, learning_rate=4.0, momentum=momentum)
    group, copies = members(config=config), three()
    payloads = sent(group, copies)
    delta = jax.tree.map(lambda leaf: leaf * 0 + 3e38, payloads[1].payload["delta"])
    payloads[1] = selector.Selected({**payloads[1].payload, "delta": delta})
    for each, own in zip(group, copies, strict=True):
        before = each.digest(0).tobytes(), each.position
        with pytest.raises(
            member.RoundError,
            match="^cluster:1 sent a delta of fragment 0 in the round of step 4 of up"
            r" to 3e\+38, with which the outer step is not finite; the others are of up"
            r" to 0\.\d+ of cluster:\d, 0\.\d+ of cluster:\d$",
        ):
            each.incoming(4, 0, own, payloads)
        assert (each.digest(0).tobytes(), each.position) == before


def close(group, copies):
    return group[0].close(4, copies[0], [each.closing(4) for each in group])


@pytest.mark.parametrize(
    ("whose", "after", "where"),
    [
        (2, lambda group, copies: a_round(group, copies, 8, 0), "0 in the round of"),
        (1, close, "2 in the round of"),
    ],
    ids=["in the next round", "at the end"],
)
def test_a_divergence_shows(whose, after, where):
    group = members()
    copies = a_round(group, three())
    changed = table(group[whose]).at[0, 0].add(1e-6)
    group[whose].outers[0].anchor["embeddings/table"] = changed
    words = f"cluster:{whose} and cluster:0 have diverged: .* of fragment {where}"
    with pytest.raises(member.RoundError, match=words):
        after(group, copies)


def test_a_codec_whose_receiver_remembers_is_refused():
    messages.check_codec(codecs.from_string("error_feedback(int4(8)|fp16)"))
    add, subtract = (
        lambda one, two, by=by: jax.tree.map(by, one, two)
        for by in (jnp.add, jnp.subtract)
    )
    differences = codec_lib.Codec(
        init=lambda spec: jax.tree.map(jnp.zeros_like, spec),
        encode=lambda arrays, state: (subtract(arrays, state), arrays),
        decode=lambda payload, state: 2 * (add(payload, state),),
        name="differences",
    )
    words = "its receiver remembers what came before"
    with pytest.raises(errors.SettingsError, match=words):
        messages.check_codec(differences)
