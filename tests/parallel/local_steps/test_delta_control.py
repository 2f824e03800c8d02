"""The choice of a codec for deltas: alone, and among members of one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.parallel.local_steps import delta_control, rounds
from nebula_jax.training import local_steps

CLUSTERS = ["cluster:0", "cluster:1"]
CONFIG = local_steps.Config(inner_steps=4, fragments=2, delay=1)
LADDER = selector.by_step(
    [codecs.fp16(), codecs.from_string("int8(64)").codec], lambda step: 0
)
SIZES = [200, 110]


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def after(choice, clock, computed, waited):
    """What a cluster sends that computed and waited for so many seconds."""
    clock.seconds += computed
    with choice.waiting():
        clock.seconds += waited
    number = len(choice.rows) + 1
    return choice.figures(number, 0.999)


def test_figures_are_the_cosine_and_the_wait_in_millionths():
    clock = Clock()
    choice = delta_control.Choice(SIZES, 0.98, now=clock)
    found = after(choice, clock, 10.0, 0.1)
    np.testing.assert_allclose(found, [1_999_000, 500_000], atol=1)
    assert found.dtype == delta_control.spec().dtype
    assert found.shape == delta_control.spec().shape
    found = after(choice, clock, 10.0, 10.0)
    assert found[1] == pytest.approx(50_000_000)
    assert after(choice, clock, 0.0, 1e9)[1] == delta_control.MOST


def test_after_four_rounds_that_wait_for_the_line_the_next_codec_is_used():
    clock = Clock()
    choice = delta_control.Choice(SIZES, 0.98, now=clock)
    waits = iter([0.0] + [1.0] * 99)  # nobody waited for the round before the first
    used = []
    for number in range(1, 12):
        used.append(choice.option(number))
        figures = after(choice, clock, 10.0, next(waits))
        choice.write(number, [figures, figures])
    # The wait for round n goes with the message of round n + 1.
    assert used == [0] * 5 + [1] * 6


def test_a_wait_for_a_round_of_the_codec_before_does_not_count():
    """The wait that the first message by a new codec has is not of that codec."""
    clock = Clock()
    choice = delta_control.Choice([400, 200, 100], 0.98, now=clock)
    used = []
    for number in range(1, 40):
        used.append(choice.option(number))
        # Whoever has sent by the gentlest codec waits; by others nobody does.
        waited = 1.0 if number > 1 and used[number - 2] == 0 else 0.0
        figures = after(choice, clock, 10.0, waited)
        choice.write(number, [figures, figures])
    assert set(used) == {0, 1}


def test_a_wait_for_a_slower_cluster_is_no_wait_for_the_line():
    """The slowest cluster does not wait, and what it reports counts."""
    clock = Clock()
    choice = delta_control.Choice(SIZES, 0.98, now=clock)
    for number in range(1, 10):
        waits = after(choice, clock, 10.0, 5.0)
        choice.write(number, [waits, after(choice, clock, 15.0, 0.0)])
    assert choice.option(10) == 0


def test_a_codec_that_one_cluster_finds_too_coarse_is_left():
    clock = Clock()
    choice = delta_control.Choice(SIZES, 0.98, now=clock)
    for number in range(1, 8):
        waits = after(choice, clock, 10.0, 1.0)
        coarse = waits.copy()
        if choice.option(number):
            coarse[0] = 1_900_000
        choice.write(number, [waits, coarse])
    assert choice.option(7) == 1
    assert choice.option(8) == 0


def test_a_run_that_goes_on_takes_what_its_clock_measured_from_the_file(tmp_path):
    clock = Clock()
    choice = delta_control.Choice(SIZES, 0.98, tmp_path, clock)
    for number in range(1, 5):
        choice.write(number, [after(choice, clock, 10.0, number / 10)])
    with (tmp_path / delta_control.FILE).open("a") as file:
        file.write("\n[5, 0.")  # of a process that was killed
    again = delta_control.Choice(SIZES, 0.98, tmp_path, clock)
    again.go_on(choice.rows[:2])
    for number in (3, 4):
        again.write(number, [after(again, clock, 10.0, 7.0)])
    assert again.rows == choice.rows
    text = (tmp_path / delta_control.FILE).read_text()
    assert len(text.split()) == 2 * 4 + 2


def test_a_run_that_begins_anew_measures_anew(tmp_path):
    """The line of an attempt that was not saved may have been another."""
    clock = Clock()
    choice = delta_control.Choice(SIZES, 0.98, tmp_path, clock)
    choice.write(1, [after(choice, clock, 10.0, 1.0)])
    again = delta_control.Choice(SIZES, 0.98, tmp_path, clock)
    again.go_on(None)
    again.write(1, [after(again, clock, 10.0, 0.0)])
    assert again.rows[0][5] == 0.0 != choice.rows[0][5]


def test_the_first_round_after_a_stop_has_the_wait_of_the_one_before_it():
    """What was waited for in the process before is not known, and is not none."""
    clock = Clock()
    choice = delta_control.Choice(SIZES, 0.98, now=clock)
    for number in range(1, 4):
        choice.write(number, [after(choice, clock, 10.0, 1.0)])
    again = delta_control.Choice(SIZES, 0.98, now=clock)
    again.go_on(choice.rows)
    again.write(4, [after(again, clock, 10.0, 0.0)])
    again.write(5, [after(again, clock, 10.0, 0.0)])
    waits = [row[5] for row in again.rows]
    assert waits == pytest.approx([5.0, 5.0, 5.0, 5.0, 0.0])


def test_what_cannot_be_is_refused():
    delta_control.check(np.asarray([2_000_500, 2**32 - 1], np.uint32))
    with pytest.raises(ValueError, match=r"a cosine of 3\.000"):
        delta_control.check(np.asarray([4_000_000, 0], np.uint32))
    choice = delta_control.Choice(SIZES, 0.98)
    assert choice.figures(1, 1.5)[0] == delta_control.MOST_COSINE
    with pytest.raises(ValueError, match="a probe of step 3 where one of step 1"):
        choice.write(3, [np.asarray([2_000_000, 0], np.uint32)])


def params(seed: int = 0):
    random = np.random.default_rng(seed)
    return {
        "encoder": {
            f"layer_{k}": jnp.asarray(random.normal(size=(64, 64)), jnp.float32)
            for k in range(2)
        }
    }


def members(clock):
    found = [
        rounds.Member(
            *(CONFIG, LADDER, CLUSTERS, name, params()),
            choice=delta_control.Choice(SIZES, 0.98, now=clock),
        )
        for name in CLUSTERS
    ]
    for each in found:
        each.go_on(each.first(params()), None)
    return found


def a_round(group, copies, number, clock):
    step, fragment = 2 * number, number % 2
    for each in group:
        with each.choice.waiting():
            clock.seconds += 1.0
    sent = [
        each.outgoing(step, fragment, own)
        for each, own in zip(group, copies, strict=True)
    ]
    return sent, [
        each.incoming(step, fragment, own, sent)[0]
        for each, own in zip(group, copies, strict=True)
    ]


def test_members_use_the_codec_that_follows_from_all_messages():
    clock = Clock()
    group = members(clock)
    copies = [
        jax.tree.map(lambda a, b: a + 0.1 * b, params(), params(seed))
        for seed in (1, 2)
    ]
    sizes = []
    for number in range(1, 8):
        clock.seconds += 10.0
        sent, copies = a_round(group, copies, number, clock)
        assert {each.option for each in sent} == {int(number > 5)}
        sizes.append(codec_lib.nbytes(sent[0]))
    assert sizes[-1] < 0.6 * sizes[0]
    assert group[0].choice.rows == group[1].choice.rows
    np.testing.assert_array_equal(group[0].digest(0), group[1].digest(0))
    cosines = np.array(group[0].choice.rows)[:, 3]
    assert (cosines > 0.9999).all()
    assert cosines[-1] < 1.0
    closing = [each.closing(14) for each in group]
    for each, own in zip(group, copies, strict=True):
        each.close(14, own, closing)
    assert group[0].position["tape"] == group[0].choice.rows


def test_a_figure_that_cannot_be_is_refused_and_its_cluster_is_named():
    """Even where another cluster's, which is the least, can be."""
    clock = Clock()
    group = members(clock)
    sent = [each.outgoing(2, 1, params(1)) for each in group]
    payload = dict(sent[1].payload)
    payload["figures"] = jnp.asarray([4_000_000, 0], jnp.uint32)
    with pytest.raises(
        rounds.RoundError,
        match=r"^cluster:1 sent a delta of fragment 1 in the round of step 2 with a"
        r" cosine of 3\.000$",
    ):
        group[0].incoming(2, 1, params(1), [sent[0], selector.Selected(payload, 0)])
    assert group[0].choice.rows == []


def test_a_message_by_another_codec_is_refused():
    clock = Clock()
    group = members(clock)
    sent = [each.outgoing(2, 1, params(1)) for each in group]
    spec = group[1].specs[1]
    arrays = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)
    other, _ = LADDER.codecs[1].encode(arrays, LADDER.init(spec))
    with pytest.raises(
        rounds.RoundError,
        match="cluster:1 sent a delta of fragment 1 in the round of step 2 by codec 1"
        " of the ladder; cluster:0 expects codec 0",
    ):
        group[0].incoming(2, 1, params(1), [sent[0], selector.Selected(other, 1)])
    assert group[0].choice.rows == []
