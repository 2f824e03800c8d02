import itertools
import types

import numpy as np
import pytest

from scripts.bench import interleave
from scripts.ladder import programs, rungs, timings

BATCHES = [np.full((2, 4), number) for number in range(3)]


def ladder(attention):
    """A ladder whose rungs do nothing; 2 rows of 4 positions, joined into 1."""
    found, flags = [], dict(rungs.START)
    for rung in (*rungs.FIRST, *rungs.last(attention, 4, 2)):
        flags |= rung.flags
        rows = 1 if flags["layout"] == "joined" else 2
        encoder = types.SimpleNamespace(max_length=4)
        config = types.SimpleNamespace(rows=lambda *_, n=rows: n, encoder=encoder)
        mesh = types.SimpleNamespace(shape={"data": 1, "fsdp": 1})
        copy = types.SimpleNamespace(config=config, mesh=mesh, rows=2)
        sums = programs.AllReduces(len(found), 2, 100)
        found.append(rungs.Compiled(rung, dict(flags), copy, None, sums))
    return timings.Ladder(found, attention)


def test_all_steps_of_a_round_have_the_same_batch():
    """The one that warms up, and the one that is timed."""
    found = itertools.islice(timings.turns(BATCHES), 8)
    assert [each[0, 0] for each in found] == [0, 0, 1, 1, 2, 2, 0, 0]


def test_a_rate_is_of_the_tokens_of_its_round():
    """The first batch was that of the round that does not count."""
    assert timings.rates([2.0, 2.0, 2.0, 4.0], [10, 20, 30]) == [10, 15, 5, 5]


@pytest.mark.parametrize(
    ("fused", "found"),
    [([0.9, 0.9, 0.9], "fused"), ([0.5, 0.5, 0.99], "einsum"), ([2.0] * 3, "einsum")],
)
def test_fused_attention_goes_on_if_it_was_faster_every_time(fused, found, monkeypatch):
    def time_runs(runs, rounds, warm):
        assert list(runs) == ["einsum", "fused"]
        return {"einsum": [1.0] * rounds, "fused": fused}

    monkeypatch.setattr(interleave, "time_runs", time_runs)
    monkeypatch.setattr(timings, "begun", lambda compiled: compiled)
    plain, other = ladder("einsum").steps[2:4]
    assert timings.goes_on(plain, other, BATCHES) == found


@pytest.mark.parametrize(
    ("attention", "base"), [("einsum", rungs.PLAIN), ("fused", rungs.FUSED)]
)
def test_joined_rows_stand_on_the_attention_that_went_on(attention, base):
    found = ladder(attention)
    joined = found.steps[4]
    assert joined.rung.name == "joined rows"
    assert found.below(joined).rung == found.base.rung == base
    assert joined.more_than(found.base) == {"layout": "joined"}
    assert found.below(found.steps[3]).rung == rungs.PLAIN
    assert found.below(found.steps[0]) is None
    assert found.steps[-1].flags["attention"] == attention


def test_every_rung_is_one_flag_more():
    """But for accumulation, which comes with the devices that it is for."""
    found = ladder("einsum")
    more = [each.more_than(found.below(each)) for each in found.steps[1:]]
    assert more == [
        {"dtype": "bfloat16"},
        {"logits": "masked"},
        {"attention": "fused"},
        {"layout": "joined"},
        {"micro_batches": 4, "devices_per_cluster": 2},
        {"all_reduce": "once"},
        {"all_reduce": "overlapped"},
    ]


def test_one_device_has_nothing_to_add_up():
    assert [each.name for each in rungs.last("einsum", 4, 1)] == [
        "joined rows",
        "accumulation",
    ]


def test_figures_are_medians_and_the_rounds_ratios():
    found = ladder("einsum")
    names = [each.rung.name for each in found.steps]
    seconds = {name: [2.0, 1.0, 2.0] for name in names}
    seconds["joined rows"] = [1.0, 0.25, 1.0]
    seconds[timings.PYTORCH] = [4.0, 4.0, 4.0]
    tokens = {name: [4, 4] for name in seconds}
    curves = {name: timings.Curve([3.0, 2.0], [4, 4]) for name in names}
    curves["joined rows"] = timings.Curve([3.0, 2.5], [4, 4])
    result = timings.figures(found, curves, seconds, tokens)
    rows = {each["name"]: each for each in result["rungs"]}
    joined = rows["joined rows"]
    assert joined["ms"] == 1000
    assert joined["tokens_per_second"] == joined["least"] == 4
    assert joined["most"] == 16
    assert joined["over_below"] == joined["over_first"] == 2
    assert joined["over_pytorch"] == 4
    assert joined["difference"] == 0.5
    assert (rows[rungs.PLAIN.name]["padding"], joined["padding"]) == (0.5, 0)
    assert joined["all_reduce_times"] == names.index("joined rows")
    assert rows["accumulation"]["difference"] == 0.5
    assert rows[names[0]]["over_below"] is None
    assert [each["name"] for each in result["beside"]] == [timings.PYTORCH]
    assert result["beside"][0]["over_first"] == pytest.approx(0.5)
