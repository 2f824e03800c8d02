"""A leaf of rounds with a quorum: late, slow, anew, or left out."""

import jax
import numpy as np
import pytest
import quorum_star
import trees
from quorum_star import CONFIG, LIMIT, NAMES, assert_alike, parts
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication import codecs
from nebula_jax.communication.wire import receive_queue, session, windows
from nebula_jax.parallel.local_steps import quorum
from nebula_jax.parallel.local_steps.member import RoundError
from nebula_jax.parallel.local_steps.quorum import hub as hub_lib
from nebula_jax.training import diloco


def test_a_round_goes_on_without_a_leaf_that_is_late_which_catches_up(star):
    star = star()
    star.together(3, (0, 1))  # the round of step 2: cluster 2 stands still
    anchor = parts(quorum_star.params())[1]
    deltas = []
    for number in (0, 1):
        own = quorum_star.params()
        for step in (1, 2):
            own = quorum_star.inner_step(own, NAMES[number], step)
        part = parts(own)[1]
        deltas.append(diloco.outer_gradient(anchor, part))
    begun = diloco.begin(CONFIG, anchor)
    expected = diloco.outer_step(CONFIG, begun, deltas, [0.5, 0.5], True)
    trees.assert_same(star[0].member.outers[1].anchor, expected.anchor)
    assert star[0].end.described["without"] == {NAMES[2]: 1}

    late = star[2]
    star.arrive(2)
    late.to(1)
    assert late.step == 3  # where the hub applied the round
    assert len(late.heads) == 2
    assert_alike(*star.clusters.values())
    own = quorum_star.inner_step(quorum_star.params(), NAMES[2], 1)
    mixed = diloco.mix(CONFIG, parts(own)[1], expected.anchor)
    trees.assert_same(parts(late.params)[1], mixed)
    trees.assert_same(parts(late.params)[0], parts(own)[0])
    star.together(9)  # now it is in time
    assert star[0].end.described["without"] == {NAMES[2]: 1}
    assert late.end.described["missed"] == 1
    assert_alike(*star.clusters.values())
    assert star.log == ["the round of step 2 goes on without cluster:2"]


def test_a_leaf_that_is_rounds_behind_skips_them_all_at_once(star):
    star = star()
    star.together(9, (0, 1))
    late = star[2]
    wait_until(lambda: late.end._log.receive() and len(late.end._log.entries) == 4)
    late.to(1)
    assert late.step == 9
    assert [head.step for head in late.heads] == [2, 2, 4, 4, 6, 6, 8, 8]
    assert_alike(*star.clusters.values())
    for number in (1, 2):  # nothing is kept of rounds that are over
        log = star[number].end._log
        assert not log._deltas
        assert not log.entries
    assert not star[0].end._taken


def test_a_leaf_that_has_sent_in_time_and_is_then_slow_skips_the_rest(star):
    """It applies the round that it is in, and the one that went on without it."""
    star = star()
    star.together(2)
    star.have_arrived(2, 1, 3)
    star.together(5, (0, 1))
    late = star[2]
    wait_until(lambda: late.end._log.receive() and len(late.end._log.entries) == 2)
    late.step = 2
    late.to(3)
    assert late.step == 5
    assert late.end.described["missed"] == 1
    assert [head.step for head in late.heads] == [2, 2, 2, 4, 4]
    star.together(7)
    assert_alike(*star.clusters.values())


def test_a_leaf_that_is_too_far_behind_at_the_end_is_left_out(star, monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1)
    monkeypatch.setattr(receive_queue, "MAX_BYTES", 1)
    # Else there may be room for the state of the end before the run has ended.
    monkeypatch.setattr(hub_lib.Hub, "_bring", lambda *_: None)
    star = star()
    star.together(25, (0, 1))
    star.finish((0, 1))
    closing = star._pool.submit(star[0].end._leaves[NAMES[2]].link.close)
    late = star[2]
    wait_until(lambda: not late.end._log.receive())
    with pytest.raises(quorum.LeftOut, match="has ended without cluster:2, which was"):
        late.to(100)
    # As soon as it has read all, not when it needs more.
    assert CONFIG.applied_after(late.step) is None
    star.links[NAMES[2]].close()
    closing.result(LIMIT)


def test_a_request_to_stop_of_a_leaf_that_is_late_ends_the_run(star):
    """It has no message in any round; so the hub's own has the request."""
    star = star()
    star.together(3, (0, 1))
    star.arrive(2)
    star[2].to(1, lambda: True)
    hub = star[0].end
    wait_until(lambda: hub._leaves[NAMES[2]].link.stop_step is not None)
    star.together(5, (0, 1))
    star.arrive(2)
    star[2].to(4, lambda: True)
    for cluster in star.clusters.values():
        assert [(each.step, each.is_stopping) for each in cluster.heads] == [
            (2, 0),
            (2, 0),
            (4, 1),
            (4, 0),
        ]
    assert star[2].end.described["messages"] == 0


def test_a_leaf_sends_no_message_of_a_round_that_is_closed(star):
    """Its residual would be taken out of the codec, and be lost."""
    config = diloco.Config(inner_steps=4, mixing=0.0)
    codec = codecs.from_string("error_feedback(int4(8)|fp16)")
    star = star(config=config, codec=codec)
    star[2].to(3)
    closing = star._pool.submit(star[0].to, 4)
    star[1].to(4)
    closing.result(LIMIT)
    before = jax.device_get(star[2].member.codecs)
    star.arrive(2)
    star[2].to(4)
    described = star[2].end.described
    assert (described["missed"], described["messages"]) == (1, 0)
    trees.assert_same(star[2].member.codecs, before)
    assert_alike(*star.clusters.values())


def test_a_verdict_of_another_version_is_refused(star):
    star = star()
    star.together(3, (0, 1))
    star[2].member.versions[1] = 4
    star.arrive(2)
    with pytest.raises(errors.NebulaError, match="at version 0 of fragment 1"):
        star[2].to(1)


def test_leaves_need_what_a_verdict_counts(star):
    star = star()
    star.together(3, (0, 1))
    star.arrive(2)
    leaf = star[2].end
    leaf._log.receive()
    leaf._log._deltas.pop((NAMES[1], (2, 1)))
    with pytest.raises(errors.NebulaError, match="counts a message of cluster:1"):
        star[2].to(1)


def test_the_end_of_the_hub_is_the_end_of_its_leaves(star):
    star = star()
    star.together(2)
    for leaf in star[0].end._leaves.values():
        leaf.link.abort("the disk is full")
    with pytest.raises(session.PeerAborted, match="the disk is full"):
        star[1].to(3)


def test_a_state_is_not_taken_by_a_leaf_that_has_missed_nothing(star):
    """Its line had no room for a while; its message is in the round all the same."""
    star = star(quorum=3)
    star.together(2)
    star[0].end._leaves[NAMES[2]].follows = False
    star.together(3)
    described = star[2].end.described
    assert (described["from_state"], described["missed"]) == (0, 0)
    assert "cluster:2 is sent the state after step 0" in star.log
    anchor = star[2].member.outers[1].anchor
    mixed = parts(star[2].params)[1]
    for name, leaf in anchor.items():
        assert not np.array_equal(mixed[name], leaf)
    star.together(9)
    assert_alike(*star.clusters.values())


def test_the_last_rounds_of_a_run_have_no_heads(star):
    star = star()
    star.together(7, (0, 1))
    star.together(8, (0, 1))  # its round is applied by `finish`
    star.finish((0, 1))
    late = star[2]
    wait_until(lambda: late.end._log.receive() and len(late.end._log.entries) == 6)
    late.to(1)
    assert late.step == 8
    assert [head.step for head in late.heads] == [2, 2, 4, 4, 6, 6]
    late.finish()
    trees.assert_same(late.params, star[0].params)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fragment": 2**32 - 1}, "fragment 4294967295 in the round"),
        ({"fragment": 2}, "fragment 2 in the round of step 2"),
        ({"fragment": 0}, "fragment 0 in the round of step 2"),
        ({"after": 4}, "applied after step 4"),
        ({"after": 2**32 - 1}, "applied after step 4294967295"),
        ({"step": 2**31 - 3, "after": 2**31 - 2}, "in the round of step 2147483645"),
        ({"step": 6, "after": 7}, "the round of step 6, where that of step 2 follows"),
        ({"is_last": 1, "step": 1}, "in the round of step 1"),
        ({"is_last": 1, "after": 9}, "applied after step 9"),
        ({"is_last": 2}, "is_last=2"),
        ({"is_state": 2}, "is_state=2"),
        ({"members": (False, False, False)}, "counts no message of its own"),
    ],
)
def test_a_verdict_that_cannot_be_is_an_error_of_the_hub(star, change, words):
    star = star(quorum=1)
    hub = star[0].end
    announce = hub._announce

    def altered(leaf, entry):
        members = change.get("members", entry.members)
        fields = {name: value for name, value in change.items() if name != "members"}
        verdict = entry.verdict._replace(**fields)
        announce(leaf, quorum.Entry(verdict, members))

    hub._announce = altered
    star.together(3, (0,))
    star.arrive(2)
    with pytest.raises(RoundError, match=f"^cluster:0 .*{words}"):
        star[2].to(1)


def has_been_sent(star, name):
    """Waits until the hub has sent a leaf the state of the run."""
    hub = star[0].end
    wait_until(lambda: hub.poll(4, 0) or hub._leaves[name].follows)


def test_a_step_beyond_the_run_is_an_error_of_the_hub(star):
    """Of a round, or of a state that comes in its place."""
    star = star(quorum=1)
    star.together(3, (0,))
    star.arrive(2)
    star[2].end._log._last = 2
    with pytest.raises(RoundError, match="after step 3; the run has 2 steps"):
        star[2].to(1)
    leaf = star.start_anew(1).end
    leaf._log._last = 2
    star[0].to(4)
    has_been_sent(star, NAMES[1])
    with pytest.raises(RoundError, match="after step 3; the run has 2 steps"):
        leaf.begin(LIMIT)


def test_states_that_did_not_come_are_an_error_of_the_hub(star):
    star = star()
    hub = star[0].end
    verdict = quorum.Verdict(1, 0, 0, 0, 0)
    nothing = quorum.Entry(verdict, (False,) * 3)
    hub._announce(hub._leaves[NAMES[2]], nothing)
    star.arrive(2)
    with pytest.raises(RoundError, match="on states of the run that did not"):
        star[2].to(1)


@pytest.mark.parametrize(
    ("versions", "closed", "scale", "words"),
    [
        ([2**32 - 1, 0], [0, 2], 1.0, r"versions .4294967295, 0."),
        ([0, 1], [0, 2**32 - 1], 1.0, r"rounds of steps .0, 4294967295."),
        ([0, 1], [0, 2], np.nan, "nan is not finite"),
    ],
)
def test_a_state_that_cannot_be_is_an_error_of_the_hub(
    star, versions, closed, scale, words
):
    star = star(quorum=1)
    hub = star[0].end
    star.together(3, (0,))
    hub._closed = closed
    hub._member.versions = list(versions)
    hub._member.outers = jax.tree.map(lambda leaf: leaf * scale, hub._member.outers)
    anew = star.start_anew(2)
    has_been_sent(star, NAMES[2])
    assert anew.end.begin(LIMIT) == 3
    with pytest.raises(RoundError, match=f"^cluster:0 .*{words}"):
        anew.to(1)


def test_a_leaf_goes_on_after_a_step_that_it_has_or_from_the_state(star):
    star = star(start=9, saved={NAMES[1]: (5, 9), NAMES[2]: (5,)}, is_begun=False)
    hub = star[0].end
    hub._welcome(hub._leaves[NAMES[1]], 7)
    with pytest.raises(RoundError, match="cluster:0 resumes after step 7; cl"):
        star[1].end.begin(LIMIT, (5, 9))
    leaf = hub._leaves[NAMES[2]]
    hub._welcome(leaf, quorum.IN_FLIGHT)
    closed = quorum.Verdict(0, 3, 2, 1, 0)
    hub._announce(leaf, quorum.Entry(closed, (True,) * 3))
    with pytest.raises(RoundError, match="a round without the state of the run"):
        star[2].end.begin(LIMIT, (5,))
