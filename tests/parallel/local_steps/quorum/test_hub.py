"""The hub of rounds with a quorum: what it sends and waits for, and who rejoins."""

import time

import pytest
import quorum_star
import trees
from quorum_star import LIMIT, NAMES, assert_alike
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication import codecs
from nebula_jax.communication.wire import receive_queue, session, windows
from nebula_jax.parallel.local_steps import quorum, rounds
from nebula_jax.parallel.local_steps.quorum import hub as hub_lib


def test_a_message_that_comes_after_the_verdict_is_dropped(star):
    star = star()
    star.together(1)
    star.proxies[NAMES[2]].swallow("up")  # it is sent, and does not arrive
    for number in (0, 1, 2):
        star[number].to(2)
    star.have_arrived(2, 1, 2)
    star[0].to(3)
    star.proxies[NAMES[2]].cut()  # which brings it after all
    star[2].to(3)  # the verdict is that it came too late
    star[1].to(3)
    assert star[2].end.described["missed"] == 1
    assert_alike(*star.clusters.values())
    hub_end = star[0].end._leaves[NAMES[2]].up[1]
    wait_until(lambda: hub_end.next_step == 2)
    star[0].end.poll(4, 0)
    assert hub_end.next_step is None
    star.together(7)
    assert star[0].end.described["without"] == {NAMES[2]: 1}
    assert_alike(*star.clusters.values())


def test_the_hub_waits_for_a_quorum_and_then_for_the_grace_alone(star):
    star = star(quorum=2, grace=0.3)
    star[0].to(2)
    began = time.monotonic()
    waiting = star._pool.submit(star[0].to, 3)
    wait_until(lambda: star[0].end._work.waiting)
    assert "fragment 1 in the round of step 2" in str(star[0].end._work.waiting)
    time.sleep(0.2)
    assert not waiting.done()
    came = time.monotonic()
    star[1].to(2)
    waiting.result(LIMIT)
    assert 0.3 <= time.monotonic() - came < LIMIT
    assert time.monotonic() - began >= 0.5
    assert not star[0].end._work.waiting


def test_within_the_grace_a_leaf_is_waited_for_and_no_longer_than_it_takes(star):
    star = star(quorum=2, grace=60.0)
    star[0].to(2)
    star[1].to(2)
    waiting = star._pool.submit(star[0].to, 3)
    time.sleep(0.1)
    assert not waiting.done()
    star[2].to(2)
    waiting.result(LIMIT)
    assert star[0].end.described["without"] == {}


def test_a_killed_leaf_comes_anew_by_the_state_of_the_run(star):
    star = star()
    star.together(3)
    star.together(5, (0, 1))
    star.kill(2)
    anew = star.start_anew(2)
    star.together(7, (0, 1))
    assert anew.end.begin(LIMIT) in (5, 7)  # where the hub was then
    wait_until(
        lambda: anew.end._log.receive() and anew.end._log.entries[-1].verdict.after == 7
    )
    anew.to(1)
    assert anew.step == 7
    assert_alike(*star.clusters.values())
    without = star[0].end.described["without"][NAMES[2]]
    star.together(11)
    star.finish()
    assert star[0].end.described["without"] == {NAMES[2]: without}
    assert anew.end.described["from_state"] == 1
    assert_alike(*star.clusters.values())
    trees.assert_same(star[0].params, anew.params)
    assert any("cluster:2 is sent the state after step" in line for line in star.log)


def test_the_log_has_the_reason_of_a_leaf_that_gives_up(star):
    star = star()
    star.together(3)
    star.links[NAMES[2]].abort("its disk is full")
    wait_until(lambda: star[0].end._leaves[NAMES[2]].link.is_over)
    star.together(7, (0, 1))
    without = [line for line in star.log if "rounds go on without" in line]
    assert len(without) == 1
    assert "without cluster:2: cluster:2 gave up: its disk is full" in without[0]


def test_what_the_former_process_sent_stays_in_the_round(star):
    """All others have it already; the new process gets it too, and sends no other."""
    star = star()
    star.together(2)
    star.have_arrived(2, 1, 3)  # all are in; then it is killed
    anew = star.start_anew(2)
    star[0].end.poll(2, 1)
    assert anew.end.begin(LIMIT) == 0
    anew.params = quorum_star.params(9)  # not what it began with
    anew.to(2)
    again = star[0].end._leaves[NAMES[2]].up[1]
    wait_until(lambda: again.next_step == 2)
    star.together(3)
    assert star[0].end.described["without"] == {}
    assert anew.end.described["missed"] == 0
    assert again.next_step is None
    assert_alike(*star.clusters.values())


def test_a_leaf_that_is_killed_while_a_quorum_needs_it_is_waited_for(star):
    """Without it the round cannot be closed; it comes anew, and sends its message."""
    star = star(quorum=3)
    star.together(3)
    for number in (0, 1):
        star[number].to(4)
    waiting = star._pool.submit(star[0].to, 5)
    star.kill(2)
    anew = star.start_anew(2, is_hub_waiting=True)
    assert anew.end.begin(LIMIT) == 3
    anew.to(1)
    assert anew.step == 3
    anew.to(4)
    waiting.result(LIMIT)
    star[1].to(5)
    anew.to(5)
    assert star[0].end.described["without"] == {}
    assert_alike(*star.clusters.values())


def test_the_hub_does_not_wait_for_a_leaf_that_does_not_read(star, monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1)
    monkeypatch.setattr(receive_queue, "MAX_BYTES", 1)
    star = star()
    began = time.monotonic()
    with monkeypatch.context() as patch:
        # On a busy machine there may be room for the state of the run for a moment.
        patch.setattr(hub_lib.Hub, "_bring", lambda *_: None)
        star.together(25, (0, 1))
    assert time.monotonic() - began < LIMIT
    lines = [
        "the round of step 2 goes on without cluster:2",
        "rounds go on without cluster:2: it does not take what it is sent",
    ]
    # A state that a slow machine sent before the window was full may follow.
    assert star.log[:2] == lines
    assert star[0].end.described["without"] == {NAMES[2]: 12}
    assert_alike(star[0], star[1])

    late = star[2]  # it goes on: with what it has, then with the state of the run

    catching_up = star._pool.submit(late.to, 25)
    wait_until(lambda: star[0].end.poll(26, 1) or catching_up.done())
    catching_up.result()
    assert late.step == 25
    assert late.end.described["from_state"] >= 1
    assert star.log[-1] == "cluster:2 is sent the state after step 25"
    star.together(29)
    star.finish()
    assert_alike(*star.clusters.values())
    trees.assert_same(star[0].params, late.params)


def test_too_few_clusters_end_the_hub(star):
    star = star(quorum=2, timeout=0.3)
    star[0].to(2)
    for name in NAMES[1:]:
        star.links[name].abort("killed")
    began = time.monotonic()
    with pytest.raises(quorum.TooFew) as caught:
        star[0].to(3)
    assert 0.3 <= time.monotonic() - began < LIMIT
    assert str(caught.value) == ("1 of 3 clusters are left, for 0.3 s; a round needs 2")
    assert isinstance(caught.value, errors.PeerAbsent)


def test_a_hub_that_is_to_stop_waits_for_no_quorum(star, monkeypatch):
    def stop(peer):
        raise errors.NebulaError(f"stopped while it waited for {peer}")

    monkeypatch.setattr(hub_lib.link_lib, "LOST_SECONDS", 0.1)
    star = star(quorum=2, timeout=600.0)
    star[0].to(2)
    star[0].end._work.on_lost = stop
    for name in NAMES[1:]:
        star.links[name].abort("killed")
    with pytest.raises(errors.NebulaError, match="it waited for more clusters"):
        star[0].to(3)


def test_a_leaf_that_gets_nothing_done_is_not_waited_for_for_ever(star):
    """It lives, and a quorum needs it; then it counts as gone."""
    star = star(quorum=3, timeout=0.2, stuck_timeout=0.3, peer_timeout=3.0)
    star[0].to(2)
    star[1].to(2)
    for name in NAMES[1:]:
        star.links[name].work.begin()
        star.links[name].work.step_done()
    with pytest.raises(quorum.TooFew, match="2 of 3 clusters are left"):
        star[0].to(3)
    found = "rounds go on without cluster:2: cluster:0 has waited"
    assert any(found in line for line in star.log)


def test_a_message_of_a_round_that_never_comes_is_in_none_of_the_last(star):
    """A leaf was ahead of the hub when that came to the end of the run."""
    star = star()
    star.together(5)
    star[2].to(6)
    star.have_arrived(6, 1, 1)  # before the hub has found out that there is no step 6
    star.finish((0, 1))
    trees.assert_same(star[0].params, star[1].params)
    assert star[0].end.described["without"] == {NAMES[2]: 3}


def test_a_run_goes_on_after_the_hubs_newest_step(star):
    """A leaf that has it goes on too; one that does not gets the state."""
    star = star(start=9, saved={NAMES[1]: (5, 9), NAMES[2]: (5,)})
    star[0].to(10)
    assert star[2].end.begin(LIMIT) == 9
    star[2].to(10)
    star[1].to(10)
    assert [star[k].end.described["from_state"] for k in (1, 2)] == [0, 1]
    star.together(13)
    assert star[0].end.described["without"] == {}
    assert_alike(*star.clusters.values())


def test_a_leaf_that_sends_a_step_that_cannot_be_is_alone_in_its_error(star):
    star = star()
    star.together(1)
    leaf = star[2].end
    leaf._up[1].send_payload(2**63, leaf._member.outgoing(2, 1, star[2].params))
    wait_until(lambda: star[0].end.poll(2, 1) or star.links[NAMES[2]].is_over)
    star.together(9, (0, 1))
    assert star[0].end.described["without"] == {NAMES[2]: 4}
    assert_alike(star[0], star[1])
    words = "cluster:2 sent a Tensor of step 9223372036854775808"
    with pytest.raises(session.PeerAborted, match=words):
        star[2].to(3)


def test_if_all_are_in_time_it_is_the_run_without_a_quorum(star):
    made = codecs.from_string("error_feedback(fp16)")
    star = star(quorum=2, grace=5.0, codec=made)
    star.together(9)
    star.finish()
    group = [quorum_star.member(name, made) for name in NAMES]
    alone = rounds.LocalRounds(group)
    own = [quorum_star.params()] * 3
    for step in range(1, 10):
        moved = [
            quorum_star.inner_step(each, name, step)
            for each, name in zip(own, NAMES, strict=True)
        ]
        own, _ = alone.after(step, moved)
    own = alone.finish(9, own)
    for cluster, expected in zip(star.clusters.values(), own, strict=True):
        trees.assert_same(cluster.params, expected)
    assert_alike(*star.clusters.values())
    assert star.log == []
    assert star[0].end.described["without"] == {}
    # Whose messages were in the rounds, and its bytes, are as without a quorum.
    described = alone.described
    for cluster in star.clusters.values():
        found = cluster.end.described
        assert found | described == found
