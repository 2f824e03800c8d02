"""Codecs that a run over two clusters chooses by itself."""

import json
import shutil

import numpy as np
import pytest
import tiny_translations
import trees

from experiments.abnet import channels, config, control, report
from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, loopback
from nebula_jax.parallel import codec_control

STEPS, EVERY, SAVED = 16, 2, 8
RUN = {
    **tiny_translations.ALIKE,
    "steps": STEPS,
    "checkpoint_every": SAVED,
    "forward_codec": "auto",
    "backward_codec": "auto",
    "quality": 0.5,  # gradients of so small a model are coarse
    "probe_every": EVERY,
    "bottleneck": 8,
    "tls": "off",
    # So slow that whatever crosses is waited for, though the machine has other work.
    "wan": "20kbit,1ms",
}


@pytest.fixture(scope="module")
def split(runs):
    """A run over a slow line: its folder."""
    runs.finished(workdir="split", **RUN)
    return runs.folder / "split"


def log_of(workdir):
    """The rows of the decision log, as the summaries of both sides have them."""
    source, target = (
        json.loads((workdir / name / "summary.json").read_text())["decisions"]
        for name in ("source", "target")
    )
    assert source == target
    return np.array(source)


def opened(agreed, width):
    """Both sides' ends of the channels of probes, and of no others."""
    rows = channels.table(agreed, 60, width)
    rows = [row for row in rows if row.name in {name for name, *_ in channels.PROBE}]
    return [
        channels.ControlEnds(
            *(
                end.sender(row.name, row.spec, row.codec)
                if row.sender == role
                else end.receiver(row.name, row.spec, row.codec, check=row.check)
                for row in rows
            )
        )
        for role, end in zip(
            ("source", "target"), loopback.ends(seconds=20.0), strict=True
        )
    ]


def probed(folder, seconds, pool, position=None):
    """What both sides write of probes alone, of which each takes so many seconds.

    The gradients are as they should be: 0.01 s of a micro-batch are computing.
    """
    agreed, width = agreed_of(), 16
    sides = control.Control(agreed, width, folder), control.Control(agreed, width)
    ends = opened(agreed, width)
    passes = [control.Passed({"w": np.float32([3, 4])}, 0.01, seconds)] * 2
    for each in sides:
        each.resume(position)
    for step in filter(sides[0].is_probed, range(1, STEPS + 1)):
        asked = pool.submit(sides[0]._propose, step, passes, ends[0])
        sides[1]._accept(step, passes, ends[1])
        asked.result(20)
    source, target = (each.described for each in sides)
    assert source == target
    return source


def test_both_sides_write_what_both_found_and_a_run_that_goes_on_does_not_measure(
    tmp_path, pool
):
    """Whole runs do so below."""
    found = probed(tmp_path, 60.0, pool)
    log = np.array(found["decisions"])
    np.testing.assert_array_equal(log[:, 0], np.arange(EVERY, STEPS + 1, EVERY))
    np.testing.assert_allclose(log[:, 3:5], 1.0, atol=1e-5)
    np.testing.assert_array_equal(log[:, 1:3].sum(axis=1), [0] * 4 + [2] * 4)
    assert found["levels"] == [2, 2]
    with (tmp_path / control.FILE).open("a") as file:
        file.write("\n[26.0, 1.")  # of a process that was killed
    assert probed(tmp_path, 0.01, pool, position=[]) == found
    assert probed(tmp_path / "..", 0.01, pool)["levels"] == [0, 0]


@pytest.mark.slow
def test_it_begins_gentle_and_goes_on_harder_while_the_line_is_waited_for(split):
    log = log_of(split)
    np.testing.assert_array_equal(log[:, 0], np.arange(EVERY, STEPS + 1, EVERY))
    np.testing.assert_array_equal(log[:4, 1:3], 0)
    np.testing.assert_allclose(log[:4, 3:5], 1.0, atol=1e-5)  # the same codecs
    # In the first programs are compiled; in another the machine may have other work.
    assert np.sum(log[:, 5] <= 1) <= 2
    harder = log[:, 1:3].sum(axis=1)
    assert (np.diff(harder) >= 0).all()
    assert harder[:4].max() == 0
    assert set(harder) >= {0, 2}


@pytest.mark.slow
def test_only_what_the_rungs_send_crosses(split):
    """Bytes of a step fall with the levels."""
    records = [
        json.loads(line)
        for line in (split / "source" / "metrics.jsonl").read_text().splitlines()
    ]
    sent = {
        each["step"]: each["bytes_sent"] for each in records if "bytes_sent" in each
    }
    early = sent[6] - sent[4]
    late = sent[STEPS - 2] - sent[STEPS - 4]
    assert late < early


@pytest.mark.slow
def test_a_run_that_goes_on_takes_what_clocks_measured_from_the_log(runs, split):
    """And ends with the same parameters, bit for bit, whatever they would measure.

    The bottleneck and its moments are among them.
    """
    resumed = runs.folder / "resumed"
    shutil.copytree(split, resumed)
    for side in ("source", "target"):
        shutil.rmtree(resumed / side / "checkpoints" / f"{STEPS:08d}")
        (resumed / side / "summary.json").unlink()
    (resumed / "summary.json").unlink()
    with (resumed / "source" / control.FILE).open("a") as file:
        file.write("\n[26.0, 1.")  # of a process that was killed
    runs.finished(workdir="resumed", **RUN | {"wan": ""})
    np.testing.assert_array_equal(log_of(resumed), log_of(split))
    trees.assert_same(runs.sides("resumed", STEPS), runs.sides("split", STEPS))


@pytest.mark.slow
def test_the_report_names_the_codecs_and_their_steps(split):
    summary = json.loads((split / "summary.json").read_text())
    text = report.markdown(summary)
    assert "| from step | forward | backward | cosines there |" in text
    assert r"| 1 | `pack_tokens\|bf16` | `pack_tokens\|bf16` | 1.0000, 1.0000 |" in text
    assert r"`pack_tokens\|int8(64)`" in text


def test_what_follows_from_the_last_probe_is_in_the_report():
    rows = [[10, 0, 0, 1.0, 1.0, 2.0], [20, 1, 1, 0.99, 0.99, 2.0]]
    source = {"cluster": "source", "last_step": 30, "decisions": rows}

    def steps(**more):
        summary = {"flags": {}, "clusters": [source | more]}
        lines = report._decisions_markdown(summary).splitlines()[2:]
        return [line.split(" | ")[:2] for line in lines]

    int8 = r"`pack_tokens\|int8(64)`"
    int4 = r"`pack_tokens\|hadamard\|int4(64)\|bf16`"
    first = [["| 1", r"`pack_tokens\|bf16`"], ["| 11", int8]]
    assert steps() == steps(levels=[1, 1]) == first
    assert steps(levels=[2, 2]) == [*first, ["| 21", int4]]
    assert steps(levels=[2, 2], last_step=20) == first


def test_a_run_that_begins_anew_measures_anew(tmp_path):
    """The line of an attempt that was not saved may have been another."""
    (tmp_path / control.FILE).write_text("[2.0, 0.0, 0.0, 1.0, 1.0, 50.0]\n")
    chosen = control.Control(agreed_of(), 384, tmp_path)
    chosen.resume(None)
    assert (tmp_path / control.FILE).read_text().endswith("\n[]\n")
    assert chosen.described == {"decisions": [], "levels": [0, 0]}


def agreed_of(**flags):
    return tiny_translations.run(
        **tiny_translations.TINY | RUN | {"workdir": "w"} | flags
    ).agreed


def test_every_level_is_smaller():
    policy = control.policy(agreed_of(bottleneck=96), 384)
    assert len(policy.sizes[0]) == len(config.SCHEDULE)
    for of_way in policy.sizes:
        assert list(of_way) == sorted(set(of_way), reverse=True)


@pytest.mark.parametrize("size", [1.0, 1e-7, 1e-9])
def test_every_level_loses_more_than_the_one_before(size):
    """Also of a gradient that is divided by the tokens of a large batch.

    Probes compare with the first level: what that loses, others would be blamed for.
    """
    random = np.random.RandomState(0).randn(2, 16, 64).astype(np.float32)
    arrays = {
        "hidden": random * np.float32(size),
        "mask": np.ones((2, 16), bool),
        "index": np.arange(2, dtype=np.int32),
    }
    errors_of = []
    for text in config.SCHEDULE:
        codec = codecs.from_string(text)
        sent, state = codec.encode(arrays, codec.init(arrays))
        got = np.asarray(codec.decode(sent, state)[0]["hidden"], np.float64) / size
        errors_of.append(np.linalg.norm(got - random) / np.linalg.norm(random))
    assert errors_of == sorted(errors_of)
    assert errors_of[0] < 2**-8  # bfloat16's
    assert errors_of[2] < 0.12  # int4's, scales included


def test_a_level_is_what_the_codec_encodes_with():
    agreed, in_use = agreed_of(), [codec_control.Levels()]
    spec = channels.hidden_spec(agreed, 8, 8)
    arrays = {
        "hidden": np.ones(spec["hidden"].shape, np.float32),
        "mask": np.ones(spec["mask"].shape, bool),
        "index": np.arange(len(spec["index"].shape), dtype=np.int32),
    }
    codec = config.chosen_codecs(lambda step: in_use[0]).backward
    sizes = []
    for level in range(len(config.SCHEDULE)):
        in_use[0] = codec_control.Levels(0, level)
        sent, _ = codec.encode(arrays, codec.init(spec))
        sizes.append(codec_lib.nbytes(sent.payload))
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"backward_codec": "fp16"}, "--forward_codec=auto: --forward_codec and"),
        ({"forward_codec": "fp16"}, "--backward_codec=auto: --forward_codec and"),
        ({"cluster": "whole"}, "not for --cluster=whole"),
    ],
)
def test_where_nothing_can_be_chosen_it_is_refused(flags, problem):
    values = tiny_translations.TINY | RUN | {"workdir": "w", "cluster": "all"} | flags
    with pytest.raises(errors.SettingsError) as refused:
        config.check(tiny_translations.run(**values))
    assert problem in str(refused.value)


def test_figures_of_a_probe_that_cannot_be_are_refused_as_they_come():
    values = tiny_translations.TINY | RUN | {"workdir": "w", "cluster": "all"}
    agreed = tiny_translations.run(**values).agreed
    check = {row.name: row.check for row in channels.table(agreed, 60, 16)}
    check["probe.front"](np.float32([-1.0]))
    check["probe.back"](np.float32([1.0, 0.0]))
    for name, figures in (
        ("probe.front", [np.nan]),
        ("probe.front", [1.5]),
        ("probe.back", [np.nan, 1.0]),
        ("probe.back", [-1.5, 1.0]),
        ("probe.back", [0.9, -1.0]),
        ("probe.back", [0.9, np.inf]),
    ):
        with pytest.raises(ValueError, match=r"cannot be|finite"):
            check[name](np.float32(figures))
