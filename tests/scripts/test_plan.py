"""The planner's command: its counts against XLA's, its bytes against the codecs'."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.pretraining import hot_start
from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs
from nebula_jax.communication.wire import frames
from nebula_jax.parallel import planner
from nebula_jax.parallel.planner import M3, ABNet, Compute, Line, Lines
from nebula_jax.training import m3 as m3_training
from scripts import plan
from scripts.plans import (
    abnet,
    advice,
    compiled,
    count,
    m3,
    paper,
    settings,
    shapes,
    speed,
)

FLAGS = pathlib.Path(__file__).parents[2] / "experiments" / "flags"
M3_SMALL = (
    f"--flagfile={FLAGS / 'm3_quickstart.flags'}",
    *("--wan=60mbit,15ms", "--vocab_size=1000"),
)
ABNET_SMALL = (
    f"--flagfile={FLAGS / 'abnet_quickstart.flags'}",
    *("--source_layers=1", "--target_layers=1", "--wan=60mbit,15ms"),
    *("--target_model=pretrained/bert-base-uncased", "--objective=cmlm"),
)
SPEED = "--device_tflops=0.1,0.05"


def given(*arguments):
    """Settings as the command line makes them, without a command."""
    with flagsaver.flagsaver():
        flags.FLAGS(["test", *arguments])
        return settings.from_flags()


def within(found, expected, share):
    return found == pytest.approx(expected, rel=share)


# What is counted.


@pytest.mark.parametrize(
    "side", [pytest.param("generators", marks=pytest.mark.slow), "discriminator"]
)
def test_flops_and_memory_are_those_of_xla(side):
    """Of a tiny M3 step: its FLOPs within 20 %, its memory within 25 %."""
    plan_of = given(*M3_SMALL, SPEED, "--discriminator_size=mini")
    (part,) = (each for each in m3.parts(plan_of) if each.name == side)
    mesh = compiled.mesh_lib.make_mesh(jax.devices("cpu")[:1])
    executable = compiled._m3(plan_of, side, mesh).compile()
    xla = executable.cost_analysis()["flops"]
    assert within(part.forward + part.backward, xla, 0.2)
    lowered = mock.Mock(compile=lambda: executable)  # not compiled once more
    with mock.patch.object(compiled, "_m3", return_value=lowered):
        real = compiled.memory(plan_of, side)
    assert real.is_compiled
    assert within(part.memory.total, real.total, 0.25)


@pytest.mark.parametrize(
    "side", ["source", pytest.param("target", marks=pytest.mark.slow)]
)
def test_flops_of_a_half_are_those_of_xla(side):
    plan_of = given(*ABNET_SMALL, SPEED)
    (part,) = (each for each in abnet.parts(plan_of) if each.name == side)
    mesh = compiled.mesh_lib.make_mesh(jax.devices("cpu")[:1])
    xla = compiled._abnet(plan_of, side, mesh).compile().cost_analysis()["flops"]
    assert within(part.forward + part.backward, xla, 0.2)


def test_frozen_layers_have_no_weight_gradients():
    """A frozen layer's backward pass has a product for each of its forward pass."""
    for part in abnet.parts(given(*ABNET_SMALL, SPEED)):
        assert part.backward < 1.6 * part.forward
        assert part.frozen > part.trained
    for part in m3.parts(given(*M3_SMALL, SPEED)):
        assert part.backward == pytest.approx(2 * part.forward)
        assert not part.frozen


def test_a_loop_is_counted_as_often_as_it_runs():
    matrix = jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def one(x):
        return x @ x

    def five(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]

    assert count.flops(one, matrix) == 2 * 4**3
    assert count.flops(jax.jit(five), matrix) == 5 * 2 * 4**3


def test_devices_share_what_the_rules_split():
    plan_of = given(*M3_SMALL, SPEED)
    state = jax.eval_shape(
        lambda: m3_training.init_generator(m3.model(plan_of.run), 0, 0)
    )
    whole = count.bytes_on_device(state, (1, 1, 1))
    assert count.bytes_on_device(state, (8, 1, 1)) == whole
    assert count.bytes_on_device(state, (1, 2, 1)) < 0.6 * whole
    assert count.bytes_on_device(state, (1, 2, 2)) < 0.4 * whole


def test_a_generator_holds_its_gradients_from_micro_batch_to_micro_batch():
    """Those of --fan_out, beside what --micro_batches adds up."""
    runs = {
        (fan_out, parts): given(
            *(*M3_SMALL, SPEED, f"--fan_out={fan_out}", f"--micro_batches={parts}")
        )
        for fan_out in (1, 2)
        for parts in (1, 2)
    }
    found = {key: estimated(each, 0).memory.total for key, each in runs.items()}
    params = m3._traced(m3.model(runs[1, 1].run), "generators")[0].params
    gradients = codec_lib.nbytes(params)
    for parts in (1, 2):
        assert found[2, parts] - found[1, parts] == gradients
    real = compiled.memory(runs[2, 1], "generators")
    assert real.state - estimated(runs[2, 1], 0).memory.state > gradients
    assert within(found[2, 1], real.total, 0.25)


def test_the_discriminator_adds_up_no_gradients_of_fan_out():
    one, two = (
        estimated(given(*M3_SMALL, SPEED, f"--fan_out={number}"), 1).memory
        for number in (1, 2)
    )
    assert two.state == one.state
    assert two.working < 2 * one.working + 1


def test_m3s_bytes_are_those_of_a_frame():
    run = given(*M3_SMALL, SPEED).run
    spec = m3_training.tokens_spec(m3.model(run), run.agreed.batch_size)
    tokens = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)
    payload, _ = codecs.pack_ids(run.local.vocab_size).encode(tokens, ())
    buffers = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(payload)]
    frame = frames.encode(frames.Tensor(0, 1, 0, buffers), 1, 0)
    assert m3.message_bytes(run) == len(b"".join(frame))


def test_padding_does_not_cross_where_the_codec_leaves_it_out():
    few, many = (
        given(*ABNET_SMALL, SPEED, f"--padding_share={share}") for share in (0.1, 0.7)
    )
    packed = ("pack_tokens|fp16",) * 2
    assert abnet.bytes_each_way(few, packed, 2) > abnet.bytes_each_way(many, packed, 2)
    plain = ("identity",) * 2
    rows, length, width = 16, 64, 384
    expected = rows * (length * (4 * width + 1) + 4)
    for each in (few, many):
        forward, _ = abnet.bytes_each_way(each, plain, 2)
        assert forward == frames.frame_bytes(frames.Tensor, expected)
    assert codec_lib.nbytes(abnet.spec(rows, length, width)) == expected


def test_a_codec_that_begins_late_is_planned_as_begun():
    late = ("from_step(10, fp16)",) * 2
    plan_of = given(*ABNET_SMALL, SPEED)
    assert abnet.bytes_each_way(plan_of, late, 2) == abnet.bytes_each_way(
        plan_of, ("fp16",) * 2, 2
    )


def test_the_bytes_of_delta_are_the_mean_over_its_visits():
    """Two and a half epochs of eight pairs, two at a time, each encoded."""
    text = "delta(pack_tokens|hadamard|int4(64), 8)"
    flagged = ("--batch_size=2", "--micro_batches=1", "--steps=10")
    plan_of = given(*ABNET_SMALL, SPEED, *flagged)
    made = codecs.from_string(text).codec
    spec = abnet.spec(2, 64, 384)
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in spec.items()}
    arrays["mask"][:, :38] = True
    state, sent = made.init(spec), []
    for step in range(10):
        arrays["index"] = np.arange(2, dtype=np.int32) + 2 * (step % 4)
        selected, state = made.encode(arrays, state, step + 1)
        nbytes = codec_lib.nbytes(selected.payload)
        sent.append(frames.frame_bytes(frames.Tensor, nbytes))
    assert sent[4] < 0.12 * sent[3]
    plain = "pack_tokens|hadamard|int4(64)"
    forward, backward = abnet.bytes_each_way(plan_of, (text, plain), 1)
    assert forward == pytest.approx(np.mean(sent))
    assert within(backward, sent[-1], 0.01)


def test_deltas_first_visits_are_those_of_the_pairs_there_are():
    """Of which delta could remember more than there is memory for here."""
    texts = ("delta(fp16, 2000000000)", "identity")
    flagged = ("--steps=10", "--batch_size=32")
    all_new = given(*ABNET_SMALL, SPEED, *flagged)
    again = given(*ABNET_SMALL, SPEED, *flagged, "--max_pairs=32")
    first, plain = abnet.bytes_each_way(all_new, texts, 2)
    assert first == plain
    mean, _ = abnet.bytes_each_way(again, texts, 2)
    half, _ = abnet.bytes_each_way(all_new, ("fp16", "identity"), 2)
    assert mean == pytest.approx(0.1 * plain + 0.9 * half, rel=1e-3)


def test_a_plan_names_what_its_bytes_are_the_mean_of():
    def assumed(*arguments):
        return " ".join(plan._assumptions(given(*ABNET_SMALL, SPEED, *arguments)))

    assert "mean" not in assumed()
    assert "first visit" in assumed("--forward_codec=delta(fp16, 100)")


# Speed.


def test_a_measured_speed_parts_what_grows_from_what_does_not():
    def seconds(step):
        return 0.01 + step() / 1e9, 1.5

    with mock.patch.object(speed, "_time", seconds):
        found = speed.measure(lambda rows: lambda: 1e6 * rows, lambda r: 1e6 * r, 16, 3)
    assert found.flops == pytest.approx(1e9)
    assert found.update == pytest.approx(0.03)  # three times the parameters
    assert found.cores == 1.5
    part = count.Part("x", 1, 0, 1e9, 2e9, count.Memory(0, 0))
    compute = found.compute(part, devices=2)
    assert (compute.forward, compute.backward) == pytest.approx((0.5, 1.0))


def test_more_devices_of_one_machine_have_no_more_cores():
    part = count.Part("x", 1, 0, 1e9, 2e9, count.Memory(0, 0))

    def seconds(devices, update=0.0):
        cluster = speed.Speed(1e9, update, cores=2.0).compute(part, devices)
        run = M3((cluster,), cluster, (settings.NO_LINE,), message_bytes=1)
        return planner.time_of(run, cores=2.0).seconds

    assert seconds(1) == pytest.approx(6)  # both clusters need them for 3 s
    assert seconds(4) == pytest.approx(6)
    assert seconds(4, update=0.1) > seconds(1, update=0.1)  # each device has its own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "arguments"), [(m3, M3_SMALL), (abnet, ABNET_SMALL)], ids=["m3", "abnet"]
)
def test_the_steps_that_are_timed_run(room, arguments):
    plan_of = (
        given(*arguments, "--source_model=bert-base-uncased")
        if room is abnet
        else (given(*arguments))
    )
    for side in room.SIDES:
        step_of, flops_of, rows, ratio = room.trial(plan_of, side, 1, 100)
        assert flops_of(8) > 0
        assert rows >= 16
        assert ratio >= 1
        step = step_of(2)
        for _ in range(2):
            assert all(
                np.isfinite(leaf).all()
                for leaf in jax.tree.leaves(step())
                if jnp.issubdtype(leaf.dtype, jnp.floating)
            )


# Advice.

LINE = Line(1e6, 0.05)
BOTH = Lines(LINE, LINE)
RUN = M3((Compute(0.1, 0.2),), Compute(0.3, 0.4), (BOTH,), message_bytes=0.25e6)


@pytest.mark.parametrize(
    ("changes", "bottleneck"),
    [
        ({}, "discriminator"),
        ({"message_bytes": 2e6}, "line up"),
        ({"generators": (Compute(2.0, 2.0),)}, "generators"),
        ({"lines": (Lines(Line(0, 9.0), Line(0, 9.0)),)}, "round trips"),
    ],
)
def test_the_bottleneck_is_what_would_gain_most(changes, bottleneck):
    found = advice.savings(dataclasses.replace(RUN, **changes))
    assert next(iter(found)) == bottleneck
    assert 0.2 < found[bottleneck] <= 0.5 + 1e-9


def test_the_slower_direction_of_abnets_line_is_its_bottleneck():
    tiny = Compute(0.001, 0.001)
    run = ABNet(tiny, tiny, BOTH, 0.1e6, 0.2e6, micro_batches=8, in_flight=8)
    assert next(iter(advice.savings(run))) == "line down"


def test_a_far_line_needs_a_wider_window():
    far = Lines(Line(0, 2.0), Line(0, 2.0))
    run = dataclasses.replace(RUN, lines=(far,))
    window, *_ = advice.of_m3(given(*M3_SMALL, SPEED), run, None)
    assert window.startswith("--window=7: a step takes ")
    window, *_ = advice.of_m3(given(*M3_SMALL, SPEED), RUN, None)
    assert window == "--window=2 is enough; 1 would do as well."


def test_fan_out_is_the_ratio_of_both_sides_and_at_most_the_replicas():
    assert advice.fan_out(RUN, replicas=8) == (8, pytest.approx(0.7 * 8 / 0.3))
    slow = dataclasses.replace(RUN, generators=(Compute(1.0, 1.0),))
    assert advice.fan_out(slow, replicas=8) == (3, pytest.approx(0.7 * 8 / 2))
    assert advice.fan_out(slow, replicas=1) == (1, pytest.approx(0.35))


def test_fan_out_is_recommended_where_a_step_has_a_fixed_part():
    fixed = Compute(0.3, 0.4, 2.0)
    run = dataclasses.replace(RUN, discriminator=fixed)
    plan_of = given(*M3_SMALL, SPEED, "--cluster_devices=1,8")
    _, text = advice.of_m3(plan_of, run, None)
    assert text.startswith("--fan_out=8: ")
    assert "more tokens/s" in text
    _, text = advice.of_m3(plan_of, RUN, None)
    assert text.startswith("--fan_out=1 is enough")


def test_the_gentlest_codec_is_recommended_that_unloads_the_line():
    plan_of = given(*ABNET_SMALL, SPEED, "--forward_codec=", "--backward_codec=")
    compute = {side: Compute(0.2, 0.2) for side in abnet.SIDES}
    texts = []
    for rate in ("1gbit", "30mbit", "10mbit", "500kbit"):
        run = abnet.pace(plan_of, compute, settings.lines(f"{rate},1ms"))
        texts.append(advice.codec(plan_of, run, None))
    assert texts[0].startswith("The codecs given are fast enough; identity")
    assert "codec=bf16: a step takes" in texts[1]
    assert "codec=int8(tensor): a step takes" in texts[2]
    assert "hadamard|int4(32): a step takes" in texts[3]
    assert texts[3].endswith("the line is the bottleneck still.")


@pytest.mark.slow
def test_micro_batches_are_recommended_that_overlap():
    plan_of = given(*ABNET_SMALL, SPEED, "--micro_batches=1", "--max_in_flight=1")
    compute = {side: Compute(0.4, 0.4) for side in abnet.SIDES}
    run = abnet.pace(plan_of, compute, settings.lines("20mbit,1ms"))
    text, _ = advice.of_abnet(plan_of, run, None)
    assert text.startswith("--micro_batches=")
    assert "because more overlaps" in text


FP16 = ("--forward_codec=fp16", "--backward_codec=fp16")


def test_what_is_recommended_is_not_slower():
    """Two in flight would take 0.5 % longer."""
    flagged = ("--micro_batches=4", "--batch_size=4", "--max_in_flight=4")
    plan_of = given(*ABNET_SMALL, SPEED, *FP16, *flagged)
    both = {side: Compute(0.2, 0.2) for side in abnet.SIDES}
    run = abnet.pace(plan_of, both, settings.lines(",5ms"))
    text, _ = advice.of_abnet(plan_of, run, None)
    number, ahead = map(int, re.findall(r"=(\d+)", text)[:2])
    after = dataclasses.replace(advice.divide(plan_of, run, number), in_flight=ahead)
    assert planner.time_of(after).seconds <= planner.time_of(run).seconds


def estimated(plan_of, side):
    """A part with its memory alone."""
    room = plan.ROOMS[plan_of.experiment]
    name = room.SIDES[side]
    return count.Part(name, 0, 0, 0, 0, room.memory_of(plan_of, name)(plan_of))


IN_FLIGHT = ("--max_in_flight=8", "--batch_size=64", *FP16)


@pytest.mark.parametrize(
    ("arguments", "side", "of_working", "expected"),
    [
        (M3_SMALL, 0, 0.4, "--micro_batches=4"),
        # Of up to eight micro-batches all are under way at once: as many rows.
        ((*ABNET_SMALL, *IN_FLIGHT), 0, 0.8, "--micro_batches=16"),
        ((*ABNET_SMALL, *IN_FLIGHT), 0, 0.31, "--micro_batches=64 --max_in_flight=6"),
        ((*ABNET_SMALL, *IN_FLIGHT), 1, 0.6, "--micro_batches=8"),
    ],
    ids=["m3", "divided", "fewer in flight", "target"],
)
def test_a_step_planned_again_as_recommended_fits(
    arguments, side, of_working, expected
):
    plan_of = given(*arguments, SPEED)
    room = plan.ROOMS[plan_of.experiment]
    part = estimated(plan_of, side)
    limit = (part.memory.state + of_working * part.memory.working) / 1e9
    plan_of = dataclasses.replace(plan_of, memory_gb=limit)
    text = advice.memory(plan_of, room, part)
    flags_of, _, needed = text.partition("; ")[2].partition(" needs about ")
    assert flags_of == expected
    again = given(*arguments, SPEED, *flags_of.split())
    found = room.parts(again)[side].memory.total
    assert found <= 1e9 * limit
    assert needed == f"{found / 1e9:.3g} GB."


def test_what_fits_needs_no_advice_and_what_cannot_other_flags():
    plan_of = given(*M3_SMALL, SPEED)
    part = estimated(plan_of, 0)
    assert not advice.memory(plan_of, m3, part)
    large = dataclasses.replace(plan_of, memory_gb=part.memory.total / 1e9)
    assert not advice.memory(large, m3, part)
    small = dataclasses.replace(plan_of, memory_gb=part.memory.state / 1e9)
    assert "at any --micro_batches: try --remat" in advice.memory(small, m3, part)


def test_a_compiled_steps_memory_changes_as_its_estimate():
    """Which leaves out the copies that the compiler makes: here, half of all."""
    plan_of = given(*M3_SMALL, SPEED, "--micro_batches=2")
    part = estimated(plan_of, 0)
    real = count.Memory(2 * part.memory.state, 2 * part.memory.working, True)
    part = dataclasses.replace(part, memory=real)
    four = estimated(given(*M3_SMALL, SPEED, "--micro_batches=4"), 0).memory.total
    fits = dataclasses.replace(plan_of, memory_gb=1.999 * four / 1e9)
    assert "--micro_batches=4" not in advice.memory(fits, m3, part)
    fits = dataclasses.replace(plan_of, memory_gb=2.001 * four / 1e9)
    assert "--micro_batches=4 needs about" in advice.memory(fits, m3, part)


def test_a_micro_batch_too_small_for_the_devices_is_made_larger():
    small = given(*ABNET_SMALL, SPEED, "--micro_batches=8", "--cluster_devices=1,16")
    changed, note = abnet.possible(small)
    assert changed.run.agreed.micro_batches == 2
    assert "planned with --micro_batches=2" in note


# The command.


def test_the_command_prints_a_plan_and_writes_its_numbers(tmp_path, capsys):
    out = tmp_path / "plan.json"
    with flagsaver.flagsaver():
        flags.FLAGS(["test", *M3_SMALL, SPEED, f"--out={out}"])
        assert plan.main() == 0
    text = capsys.readouterr().out
    assert "The bottleneck: " in text
    assert "Recommended:" in text
    assert "Beside the paper" not in text
    found = json.loads(out.read_text())
    assert found["step"]["steps"] == 1200
    assert [each["name"] for each in found["parts"]] == [
        "each generator",
        "discriminator",
    ]
    step = found["step"]["seconds"]
    slowest = max(
        each["forward_s"] + each["backward_s"] + each["update_s"]
        for each in found["parts"]
    )
    assert step == pytest.approx(slowest, rel=0.01)


def test_the_command_plans_a_translation(capsys):
    with flagsaver.flagsaver():
        arguments = (*ABNET_SMALL, SPEED, "--price_per_device_hour=2")
        flags.FLAGS(["test", *arguments])
        assert plan.main() == 0
    text = capsys.readouterr().out
    assert "source -> target, hidden states" in text
    assert "40% of them padding" in text
    assert "at a cost of" in text


def test_the_papers_figures_stand_beside_a_plan_of_the_papers_run():
    plan_of = given(
        f"--flagfile={FLAGS / 'm3_paper.flags'}",
        *(SPEED, "--cluster_devices=8,64", "--wan=170mbit,15ms"),
    )
    slow = Compute(0.1, 0.2)  # of 64 devices: 2.4 s with 8
    run = M3((Compute(0.1, 0.2),), slow, (BOTH,), m3.message_bytes(plan_of.run))
    rows = paper.rows(plan_of, run)
    assert [row["paper"] for row in rows] == [0.85, 0.85, 4.34, 4.34]
    planned = [row["planned"] for row in rows]
    assert planned[0] == pytest.approx(1)  # 0.13 s of line, 0.3 s of compute
    assert planned[1] == pytest.approx(0.3 / (m3.message_bytes(plan_of.run) / 7.5e6))
    assert planned[2] == pytest.approx(8)


def test_the_papers_models_need_no_files():
    run = given(f"--flagfile={FLAGS / 'abnet_paper.flags'}", SPEED)
    config, has_head = abnet.translator(run)
    assert (config.source.layers, config.source.width) == (12, 768)
    assert config.source.vocab_size == 250_002
    assert (config.target.vocab_size, has_head) == (30_522, True)


def test_the_experiment_is_found_out():
    assert settings.recognize({"generators", "steps"}) == "m3"
    assert settings.recognize({"pair"}) == "abnet"
    for present in ({"steps"}, {"pair", "generators"}):
        with pytest.raises(errors.SettingsError, match="--experiment=m3 or abnet"):
            settings.recognize(present)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--cluster_devices=0,1", "--cluster_devices=0,1: expected two numbers"),
        ("--cluster_devices=1,2,3", "--cluster_devices=1,2,3: expected two"),
        ("--device_tflops=fast", "--device_tflops=fast: expected two numbers"),
        ("--wan=fast", "wan=fast: cannot read 'fast'"),
        ("--cluster_devices=3,1", "batch_size=16 does not divide over 3 devices; 18"),
        ("--model_parallel=2", "model_parallel=2 does not divide the cluster's 1"),
        ("--hot_start=nobody", "--hot_start=nobody: no such folder.*e5-small"),
        ("--generators=0", "--generators=0: expected a number from 1"),
        ("--generators=-2", "--generators=-2: expected a number from 1"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(argument, message):
    with pytest.raises(errors.NebulaError, match=message):
        plan.plan(given(*M3_SMALL, SPEED, argument))


WARM = "--hot_start=e5-small"


@pytest.mark.parametrize(
    ("common", "flagged", "message"),
    [
        (ABNET_SMALL, ["--forward_codec=auto"], "are auto together"),
        (ABNET_SMALL, ["--micro_batches=3"], "does not divide batch_size=32"),
        (ABNET_SMALL, ["--pair=es"], "--pair=es: expected two"),
        (ABNET_SMALL, ["--target_layers=13"], "--target_layers=13: .* has 12"),
        (M3_SMALL, ["--generator_start=e5-small"], "go together"),
        (M3_SMALL, [WARM, "--generator_layers=13"], "--generator_layers=13: .* has 12"),
        (M3_SMALL, [WARM, "--max_length=1024"], "--max_length=1024: .* has 512"),
        (M3_SMALL, ["--pipeline=2", "--fsdp=2"], "--pipeline=2: a plan has no"),
        (M3_SMALL, ["--emulate_compute=50,400"], "--emulate_compute=50,400: a plan is"),
    ],
)
def test_what_a_run_or_a_plan_cannot_have_is_refused(common, flagged, message):
    devices = "--cluster_devices=2,2"
    with pytest.raises(errors.SettingsError, match=message):
        plan.plan(given(*common, SPEED, devices, *flagged))


@pytest.mark.parametrize(
    ("common", "flagged", "room"),
    [
        (ABNET_SMALL, ["--cluster=source", "--coordinator=here:7071"], abnet),
        (ABNET_SMALL, ["--cluster=target", "--side_dir=nowhere"], abnet),
        (
            *(M3_SMALL, [WARM, "--discriminator_start=pretrained/minilm-l6"]),
            m3,
        ),
    ],
)
def test_what_one_cluster_is_given_and_files_do_not_matter(common, flagged, room):
    plan_of = given(*common, SPEED, *flagged)
    with mock.patch.object(hot_start, "folder", side_effect=AssertionError):
        assert room.possible(plan_of) == (plan_of, "")


@pytest.mark.parametrize("flag", ["price_per_device_hour", "device_memory_gb"])
def test_no_price_and_no_memory_is_below_0(flag):
    with pytest.raises(flags.IllegalFlagValueError, match="not a non-negative number"):
        given(*M3_SMALL, SPEED, f"--{flag}=-1")


def test_a_speed_is_given_or_measured_not_both():
    with pytest.raises(errors.SettingsError, match="leave out one of them"):
        given(*M3_SMALL, SPEED, "--calibrate")


def test_the_lines_of_a_flag_are_those_of_a_plan():
    found = settings.lines("up:60mbit,15ms,jitter=2ms;down:170mbit,20ms")
    assert found == Lines(Line(7.5e6, 0.015), Line(21.25e6, 0.02))
    assert settings.jitter("60mbit,15ms,jitter=2ms") == 0.002
    assert settings.lines("") == settings.NO_LINE
    assert planner.Line().seconds(1e9) == 0


def test_an_unknown_model_is_named_with_those_that_are_known():
    with pytest.raises(errors.SettingsError, match="ernie-m-base, bert-base-uncased"):
        shapes.of("source_model", "pretrained/some-other")


# The paper's sizes: compiled for as many devices, without weights.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "most"),
    [
        # The generator's 8 devices have 256 sequences each, with 250,002 logits at 77
        # places: only with --micro_batches do they fit.
        ("m3_paper", "8,64", {"each generator": 400e9, "discriminator": 100e9}),
        ("abnet_paper", "8,8", {"source": 8e9, "target": 4e9}),
    ],
)
def test_a_run_of_the_papers_size_compiles(name, devices, most, tmp_path):
    """In a process of its own: the number of devices is set before JAX is used."""
    out = tmp_path / "plan.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "scripts.plan", f"--flagfile={FLAGS / name}.flags"),
            *(f"--cluster_devices={devices}", "--device_tflops=40"),
            *("--wan=170mbit,15ms", "--compile", f"--out={out}"),
        ],
        check=True,
        cwd=FLAGS.parents[1],
    )
    found = json.loads(out.read_text())
    for part in found["parts"]:
        assert part["is_compiled"]
        assert part["memory_bytes"] < most[part["name"]]
    assert found["paper"]
