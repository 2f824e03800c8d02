"""Rounds with a quorum: what the hub sends; nothing changes if all are in time."""

import contextlib

import jax
import numpy as np
import pytest
import quorum_star
from quorum_star import HUB, NAMES

from nebula_jax.communication import codecs
from nebula_jax.parallel.local_steps import rounds
from nebula_jax.parallel.local_steps.quorum import log as log_lib


@pytest.fixture
def star():
    with contextlib.ExitStack() as stack:
        yield lambda **given: quorum_star.Star(stack, **given)


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


def assert_alike(*clusters):
    """Asserts that clusters have the same anchors, bit for bit."""
    assert len({tuple(each.digests()) for each in clusters}) == 1


@pytest.mark.parametrize("members", [(True, False, True), (False, False, False)])
@pytest.mark.parametrize("times", [(), ((4, 70),), ((4, 70), (6, 90))])
def test_an_entry_of_the_log_comes_back_from_its_arrays(members, times):
    entry = log_lib.Entry(log_lib.Verdict(0, 9, 8, 1, 2**32 - 1), members, times)
    arrays = log_lib.arrays_of_entry(entry)
    spec = log_lib.spec_of_entry(3)
    assert_same(
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arrays),
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), spec),
    )
    assert log_lib.entry_of_arrays(arrays) == entry


def test_a_state_has_all_that_clusters_have_alike():
    member = quorum_star.member(HUB)
    for fragment, outer in enumerate(member.outers):
        spec = log_lib.spec_of_state(member, fragment)
        assert jax.eval_shape(lambda outer=outer: outer) == spec["outer"]


@pytest.mark.parametrize("codec", ["identity", "error_feedback(fp16)"])
def test_if_all_are_in_time_it_is_the_run_without_a_quorum(star, codec):
    made = codecs.from_string(codec).codec
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
        assert_same(cluster.params, expected)
    assert_alike(*star.clusters.values())
    assert star.log == []
    assert star[0].end.described["without"] == {}
    # Whose messages were in the rounds, and its bytes, are as without a quorum.
    described = alone.described
    for cluster in star.clusters.values():
        found = cluster.end.described
        assert found["messages"] == described["messages"]
        assert found["parameters"] == described["parameters"]
