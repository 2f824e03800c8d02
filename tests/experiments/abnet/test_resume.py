"""Faults do not change a translator: kill either side, start again, same bits.

All of it is slow: test_pretrain_m3.py has the same of M3 in every run of the tests.
"""

import contextlib
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import psutil
import pytest
import tiny_runs
import tiny_translations
import trees

from experiments.abnet import translator

pytestmark = pytest.mark.slow
STEPS, EVERY = 21, 4  # the last step is no multiple: it has a checkpoint of its own
SIDES = ("source", "target")
# All sentences in one shape, codecs that remember, and a bottleneck at the cut.
RUN = {
    **tiny_translations.ALIKE,
    "steps": STEPS,
    "checkpoint_every": EVERY,
    "forward_codec": "from_step(3,error_feedback(int8(8)))",
    "backward_codec": "error_feedback(int8(8))",
    "bottleneck": 8,
}


@pytest.fixture(scope="module")
def whole(runs):
    """What a run in one process, never stopped, left for the two sides."""
    runs.finished(workdir="whole", cluster="whole", **RUN)
    return runs.sides("whole", STEPS)


@pytest.fixture(scope="module")
def undisturbed(runs):
    """A run over the line that was never stopped."""
    runs.finished(workdir="undisturbed", tls="off", **RUN)
    return runs.sides("undisturbed", STEPS)


def start_and_wait(runs, workdir, step, names=SIDES, **flags):
    """Starts a run; returns it and its clusters once `step` is saved everywhere."""
    return runs.start_and_wait(workdir, step, names, tls="off", **RUN | flags)


def newest(runs, workdir):
    """Side -> its newest step, 0 if it has none."""
    folder = runs.folder / workdir
    return {name: tiny_runs.newest(folder / name / "checkpoints") for name in SIDES}


def test_a_run_ends_bit_for_bit_the_same_through_all_kinds_of_faults(runs, whole):
    """A side that stands still and is killed, a cut line, Ctrl-C.

    The codecs do in one process what they do over the line. Disks that fail are in
    test_pretrain_m3.py and test_finetune_xnli.py.
    """
    impatient = {"peer_timeout": 1, "restart": 1, "wan": "10mbit,100ms,cut=2s@1s"}
    process, family = start_and_wait(runs, "faults", EVERY, **impatient)
    tiny_runs.pause(family["target"], 1.5)
    family["source"].kill()  # and all sides start again
    deadline = time.monotonic() + 60
    while min(newest(runs, "faults").values()) < 3 * EVERY:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)  # Ctrl-C
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "target has been silent" in output
    assert "source was killed by SIGKILL; all clusters start again" in output
    assert "stopping, all clusters save step" in output
    tiny_runs.assert_all_gone(family)
    (step,) = set(newest(runs, "faults").values())
    assert 3 * EVERY <= step < STEPS

    output = runs.finished(workdir="faults", tls="off", **RUN)
    assert output.count(f"going on after step {step}") == 2
    trees.assert_same(whole, runs.sides("faults", STEPS))
    codecs = jax.tree.leaves(whole[0]["codecs"])
    assert any(leaf.any() for leaf in codecs), "nothing was remembered"


def test_the_bottleneck_trains_and_translates(runs, whole):
    kernel, before = (
        source["state"]["params"]["bottleneck"]["kernel"]
        for source, _ in (whole, runs.sides("whole", STEPS - STEPS % EVERY))
    )
    assert kernel.shape == (16, RUN["bottleneck"])
    assert np.abs(kernel - before).max() > 1e-5
    flags = runs.flags() | RUN | {"workdir": str(runs.folder / "whole")}
    for name in ("source_model", "target_model", "data_dir", "prepared_dir"):
        flags[name] = str(runs.folder / flags[name])
    run = tiny_translations.run(**flags)
    lines = ["la casa tiene 3 puertas", "la torre tiene 5 puertas"]
    assert len(translator.Translator(run).translate(lines)) == 2


def test_a_translator_by_mask_predict_in_several_shapes_goes_on_as_well(runs):
    """Lengths are told anew, masks are those of the step, each shape has its memory.

    All columns cross.
    """
    masked = {
        "data_dir": "text",
        "source_model": "models/spanish",
        "target_model": "models/english",  # which is given a head
        "length_buckets": "8,16",
        "objective": "cmlm",
        "bottleneck": 0,
    }
    runs.finished(workdir="masked", tls="off", timeout=300, **RUN | masked)
    for step, victim in ((EVERY, "target"), (2 * EVERY, "source")):
        process, family = start_and_wait(runs, "masked_killed", step, **masked)
        family[victim].kill()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1, output
        tiny_runs.assert_all_gone(family)
    runs.finished(workdir="masked_killed", tls="off", timeout=300, **RUN | masked)
    trees.assert_same(runs.sides("masked", STEPS), runs.sides("masked_killed", STEPS))


@pytest.mark.parametrize("victim", SIDES)
def test_a_side_may_be_killed_at_any_moment(runs, undisturbed, victim):
    """While it reads, meets the other, trains, saves or translates.

    So many seconds after it has saved a step, as a machine may be fast or slow.
    """
    workdir, stood_at = f"any-{victim}", []
    # After seconds alone, on a fast machine, it may have ended: so that comes last.
    for step, seconds in ((0, 0.5), (EVERY, 0.0), (EVERY, 0.3), (0, 4.0), (STEPS, 0.0)):
        process = runs.start(workdir=workdir, tls="off", **RUN)
        deadline = time.monotonic() + 120
        while (
            not (family := tiny_runs.family_of(process)).keys() >= {*SIDES}
            or newest(runs, workdir)[victim] < step
        ) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):  # it may have ended
            family[victim].kill()
        output, _ = process.communicate(timeout=120)
        tiny_runs.assert_all_gone(family)
        stood_at.append(newest(runs, workdir)[victim])
        if process.returncode == 0:
            assert stood_at[-1] == STEPS
        else:
            assert f"{victim} was killed by SIGKILL; all clusters ended" in output
    assert stood_at[0] == 0, "it was never killed before its first checkpoint"
    assert any(0 < step < STEPS for step in stood_at), stood_at
    runs.finished(workdir=workdir, tls="off", **RUN)
    trees.assert_same(undisturbed, runs.sides(workdir, STEPS))


def test_files_of_another_run_or_of_the_other_side_are_refused(runs, undisturbed):
    """Text, models and side are compared, and what lies there stays."""
    folder = runs.folder / "undisturbed"
    model = sorted(path.name for path in (folder / "target" / "model").iterdir())
    other = tiny_translations.write_model(runs.folder / "other", 16, seed=7, layers=1)
    flags_before = (folder / "source" / "run.flags").read_text()
    side = runs.flag("undisturbed/source", "side_dir")
    alone = {"cluster": "source", "side_dir": side, "peer": "[::1]:9"}
    text = {"data_dir": "text", "max_pairs": 40}
    for workdir, flags, words in (
        ("undisturbed", text, "target_model="),
        ("undisturbed", {"source_model": other}, "source_model="),
        ("undisturbed", {"source_model": other, **alone}, "source_model="),
        ("swapped", {}, "cluster=target, this one has source"),
    ):
        if workdir == "swapped":
            shutil.copytree(folder, runs.folder / workdir)
            shutil.rmtree(runs.folder / workdir / "source" / "checkpoints")
            theirs = runs.folder / workdir / "target" / "checkpoints"
            shutil.copytree(theirs, runs.folder / workdir / "source" / "checkpoints")
        status, output = runs.run(workdir=workdir, tls="off", **RUN | flags)
        assert status == 1, output
        assert "holds a run with" in output
        assert words in output
        assert "name another --workdir" in output
    assert (folder / "source" / "run.flags").read_text() == flags_before
    assert model == sorted(p.name for p in (folder / "target" / "model").iterdir())
    assert newest(runs, "undisturbed") == dict.fromkeys(SIDES, STEPS)


def test_either_side_can_ask_to_stop_and_damage_is_left_aside(runs, undisturbed):
    step = 0
    for asked in SIDES:  # over a line on which a step takes long enough to be stopped
        following = (step // EVERY + 1) * EVERY
        process, family = start_and_wait(runs, "asked", following, wan="10mbit,50ms")
        family[asked].terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, output
        tiny_runs.assert_all_gone(family)
        (step,) = set(newest(runs, "asked").values())
    folder = runs.folder / "asked" / "source" / "checkpoints" / f"{step:08d}"
    files = [path for path in folder.rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:100])
    output = runs.finished(workdir="asked", tls="off", **RUN)
    assert f"[source] checkpoint of step {step} in " in output
    trees.assert_same(undisturbed, runs.sides("asked", STEPS))


def test_a_side_that_lost_its_files_is_told_so(runs, undisturbed):
    shutil.copytree(runs.folder / "undisturbed", runs.folder / "lost")
    shutil.rmtree(runs.folder / "lost" / "source" / "checkpoints")
    status, output = runs.run(workdir="lost", tls="off", **RUN)
    assert status == 1
    assert "no step is saved in all clusters" in output
    assert newest(runs, "undisturbed") == dict.fromkeys(SIDES, STEPS)


@pytest.mark.parametrize("backward", ["identity", "error_feedback(int8(8))"])
def test_the_whole_goes_on_bit_for_bit_too(runs, backward):
    codecs = {"forward_codec": "identity", "backward_codec": backward}
    name = f"whole-{backward[:5]}"
    flags = RUN | codecs | {"cluster": "whole"}
    runs.finished(workdir=name, **flags)
    stopped = f"{name}-stopped"
    process, _ = start_and_wait(
        runs, stopped, 2 * EVERY, ["whole"], cluster="whole", **codecs
    )
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    output = runs.finished(workdir=stopped, **flags)
    assert "going on after step" in output
    trees.assert_same(runs.sides(name, STEPS), runs.sides(stopped, STEPS))
