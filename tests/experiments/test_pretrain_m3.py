"""The M3 experiment from end to end: real processes, sockets, files."""

import collections
import dataclasses
import functools
import json
import math
import re
import shutil
import signal
import time

import configured
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import ports
import pytest
import tiny_runs
from absl.testing import flagsaver

from experiments import pretrain_m3
from experiments.m3 import config
from nebula_jax.communication.wire import frames
from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import pretrained, transformer
from nebula_jax.runtime.life import process as process_lib
from nebula_jax.runtime.records import run_folder
from nebula_jax.training import masking, metrics

CLUSTERS = ("discriminator", "generator-0", "generator-1")
SPLIT = {"steps": 5, "checkpoint_every": 5, "wan": "60mbit,2ms", "workdir": "split"}


@pytest.fixture(scope="module")
def split(runs):
    """A run of 5 steps over three processes, encrypted and traced."""
    output = runs.finished_here("--trace", **SPLIT)
    return runs.folder / "split", output


@pytest.fixture(scope="module")
def whole(runs):
    """The same in one process, saved after step 3 too."""
    runs.finished(cluster="whole", steps=5, checkpoint_every=3, workdir="whole")


@pytest.fixture(scope="module")
def vocabulary(runs, split):
    """The vocabulary file of that run."""
    return runs.flag("split", "vocabulary")


def test_the_split_run_equals_the_whole(runs, whole, split):
    """Bit for bit: the same programs, and packing loses nothing."""
    runs.assert_same("whole", "split", CLUSTERS, 5)
    evaluations = [
        [r for r in metrics.read(runs.folder / name) if "held_out_rtd_auc" in r][-1]
        for name in ("split/discriminator", "whole/whole")
    ]
    for figure in ("rtd_auc", "sampled_mlm_accuracy", "clm_accuracy"):
        key = f"held_out_{figure}"
        assert evaluations[0][key] == pytest.approx(evaluations[1][key], abs=1e-3)


def test_a_run_leaves_all_that_was_promised(split):
    folder, output = split
    summary = json.loads((folder / "summary.json").read_text())
    assert (folder / "run.flags").is_file()
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    for cluster in CLUSTERS:
        assert list((folder / cluster).glob("events.out.tfevents.*"))
        assert (folder / cluster / "checkpoints" / "00000005").is_dir()
        records = metrics.read(folder / cluster)
        assert records[-1]["step"] == 5
    assert [each["cluster"] for each in summary["clusters"]] == [
        "discriminator",
        "generator:0",
        "generator:1",
    ]
    languages = summary["held_out"][-1]["languages"]
    assert set(languages) == {"en", "de", "sw"}
    assert not (folder / "tls").exists()  # keys do not outlive the run
    page = (folder / "report.html").read_text("utf-8")
    for words in ("RTD AUC", "<svg", "sent tokens", "60mbit,2ms", "--max_length", "→"):
        assert words in page
    samples = (folder / "discriminator" / "samples.txt").read_text("utf-8").splitlines()
    assert {line.partition(":")[0] for line in samples} == set(languages)
    for word in ("step", "loss", "tokens/s", "sent", "waited", "RTD AUC", "formula"):
        assert word in output


def test_the_discriminators_encoder_is_left_as_a_checkpoint(runs, split, vocabulary):
    folder = split[0] / "discriminator" / "encoder"
    model, words = pretrained.load(folder), tokenizers.load(folder)
    pretrained.check_tokenizer(model, words)
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "feature-extraction"
    assert "random weights, and was pre-trained for 5 steps on text in" in card.text
    assert (folder / "tokenizer.json").is_file()  # for transformers
    text = "the house has 3 doors"
    own = vocabularies.load(runs.folder / vocabulary)
    assert words.encode(text) == own.encode(text)
    assert words.decode(own.encode(text)) == text
    ids = jnp.asarray(
        [[words.special.cls, *words.encode(text)[:12], words.special.sep]]
    )
    trained = runs.state("split", "discriminator", 5)["params"]
    np.testing.assert_allclose(
        hidden(model.config, model.params, ids),
        hidden(dataclasses.replace(model.config, token_types=0), trained, ids),
        atol=1e-6,
    )


@functools.partial(jax.jit, static_argnums=0)  # operation by operation takes longer
def hidden(config, params, ids):
    """[B, L, D] of an encoder."""
    embedded = transformer.Embeddings(config).apply(
        {"params": params["embeddings"]}, ids, True
    )
    return transformer.Encoder(config).apply(
        {"params": params["encoder"]}, embedded, ids >= 0, True
    )


def test_run_flags_repeat_the_run_and_a_finished_run_is_not_repeated(runs, whole):
    folder = runs.folder / "whole"
    files = ("whole/metrics.jsonl", "summary.json", "losses.png")
    before = [(folder / name).read_bytes() for name in files]
    output = runs.finished_here(f"--flagfile={folder / 'run.flags'}")
    assert [(folder / name).read_bytes() for name in files] == before
    assert "RTD AUC" in output


def evaluated(folder):
    """The newest report of --eval_only."""
    found = (folder / "evaluated").glob("*/summary.json")
    return json.loads(max(found, key=lambda path: path.stat().st_mtime_ns).read_text())


def test_eval_only_finds_the_runs_own_figures(runs, split):
    """Of another folder in the languages that it has, masked as in the run."""
    runs.write_part("swahili", ["sw"])
    output = runs.finished("--eval_only", run="split", data_dir="swahili")
    assert "swahili has no held-out text in de" in output
    assert "| mean of 1 |" in output
    found = evaluated(split[0])
    assert found["step"] == 5
    assert list(found["languages"]) == ["sw"]
    own = [
        r for r in metrics.read(split[0] / "discriminator") if "held_out_rtd_auc" in r
    ]
    for language, figures in found["languages"].items():
        for name in ("rtd_auc", "clm_accuracy", "sampled_mlm_accuracy"):
            of_run = own[-1][f"held_out_{name}"][language]
            assert figures[name] == pytest.approx(of_run, abs=1e-3)


@pytest.mark.slow  # of checkpoints alone: tests/runtime/records/test_checkpoints.py
def test_a_finished_run_goes_on_to_more_steps(runs, split):
    shutil.copytree(split[0], runs.folder / "longer")
    flags = {"cluster": "whole", "checkpoint_every": 5, "workdir": "longer"}
    output = runs.finished(steps=7, **flags)
    assert "going on after step 5, to 7 in place of 5 (steps)" in output
    assert (
        json.loads((runs.folder / "longer/summary.json").read_text())["flags"]["steps"]
        == 7
    )
    states = [runs.state("longer", name, 7) for name in CLUSTERS]
    assert all(int(state["step"]) == 7 for state in states)
    status, output = runs.run(steps=5, **flags)
    assert status != 0
    assert "holds a run with --steps=7, this one has 5" in output


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(runs, split):
    """The rate of the first step is 0, so that they are as they were after it.

    Programs depend on the number of steps: these are there.
    """
    given = {"init_from": "split", "workdir": "next", "cluster": "whole"}
    output = runs.finished(steps=5, checkpoint_every=1, seed=9, **given)
    assert "beginning with generator:1 of split, step 5" in output
    for name in CLUSTERS:
        ours, theirs = (
            runs.state(folder, name, step)
            for folder, step in (("next", 1), ("split", 5))
        )
        jax.tree.map(np.testing.assert_array_equal, ours["params"], theirs["params"])
    status, output = runs.run_here(**given | {"init_from": "nowhere", "workdir": "x"})
    assert status == 2
    assert "--init_from=nowhere: no run of pretrain_m3 is there" in output


def test_a_run_ends_bit_for_bit_the_same_through_all_kinds_of_faults(runs, split):
    """A disk that fails, a process that stands still, a kill, a line that is cut.

    It begins in one process and goes on over three clusters; the line is so slow that
    each moment is found. More faults are in m3/test_resume.py.
    """
    flags = {"workdir": "faults", "steps": 5, "checkpoint_every": 1, "window": 0}
    saved = "generator-0/checkpoints/00000002"
    status, output = runs.run(cluster="whole", failing=f"EIO:rename:{saved}", **flags)
    assert status == 1
    last = output.strip().splitlines()[-1]
    assert "could not save step 2 in faults/generator-0/checkpoints" in last
    assert "Input/output error" in last

    flags |= {"wan": "10mbit,200ms,cut=2s@1s", "tls": "off"}
    flags |= {"peer_timeout": 1, "restart": 1}
    process, family = runs.start_and_wait(step=2, folders=CLUSTERS, **flags)
    tiny_runs.pause(family["generator:1"], 1.5)
    family["discriminator"].kill()  # and all clusters start again
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    tiny_runs.assert_all_gone(family)
    assert "generator:1 has been silent" in output
    assert "waiting for it to come back" in output
    assert "discriminator was killed by SIGKILL; all clusters start again" in output
    assert output.count("going on after step") >= 3
    runs.assert_same("faults", "split", CLUSTERS, 5)
    summary = json.loads((runs.folder / "faults" / "summary.json").read_text())
    (restart,) = summary["restarts"]
    assert restart["cluster"] == "discriminator"
    assert 0 < restart["seconds"] < 60
    assert f"{restart['seconds']:.1f} s until the next step" in output


def test_ctrl_c_while_clusters_start_ends_at_once_and_quietly(runs, split):
    process = runs.start(steps=5, workdir="early")
    for line in process.stdout:
        if line.startswith("preparing the text"):
            break
    time.sleep(1.0)  # the clusters are importing, compiling or meeting
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output


def test_a_folder_with_another_run_is_not_overwritten(runs, split, monkeypatch, capsys):
    monkeypatch.chdir(runs.folder)
    before = (split[0] / "run.flags").read_text()

    def refused(**given):
        """The message of the command, here: nothing is started."""
        with flagsaver.flagsaver():
            given = SPLIT | {"devices_per_cluster": 0} | given
            configured.parse(config, **runs.flags() | given)
            assert process_lib.guarded(pretrain_m3.main) == 1
        assert (split[0] / "run.flags").read_text() == before
        return capsys.readouterr().err

    wanted = "split holds a run with --batch_size=4, this one has 8"
    assert wanted in refused(batch_size=8)
    with run_folder.lock(split[0]):
        assert "another process works in split" in refused()


def test_every_frame_that_crosses_is_counted_and_nothing_but_ids_does(split):
    """Corrupted ids, marks and originals at 7 bits (V = 120), and control frames."""
    folder, _ = split
    vocab_size = json.loads((folder / "summary.json").read_text())["vocab_size"]
    bits = (vocab_size - 1).bit_length()
    positions, slots = 4 * 16, 4 * masking.capacity(0.15, 16)
    payload = (
        math.ceil(positions * bits / 8) + positions // 8 + math.ceil(slots * bits / 8)
    )
    frame = frames.head_bytes() + frames.LAYOUTS[frames.Tensor].size + payload
    control = frames.head_bytes() + frames.LAYOUTS[frames.StepDone].size
    languages = {"generator-0": 2, "generator-1": 1}
    for cluster, count in languages.items():
        ledger = json.loads((folder / cluster / "summary.json").read_text())["ledger"]
        assert ledger["sent tokens"] == [5, 5 * frame]
        # Held-back text: before step 1, after step 4 and after the last one.
        assert ledger["sent held_out"] == [3 * count, 3 * count * frame]
        assert ledger["received StepDone"] == [5, 5 * control]
        welcomes, size = ledger["received Welcome"]  # which describes two channels
        assert welcomes == 1
        assert control < size < control + 1000
        assert set(ledger) <= {
            "sent Open", "sent Hello", "sent tokens", "sent held_out", "sent Ping",
            "received Open", "received Hello", "received Welcome",
            "received StepDone", "received Ping", "received End",
        }  # fmt: skip
        received = json.loads((folder / "discriminator/summary.json").read_text())
        theirs = received["ledgers"][cluster.replace("-", ":")]
        assert theirs["received tokens"] == ledger["sent tokens"]
        assert theirs["received held_out"] == ledger["sent held_out"]


LOOPS = {"compute", "wait", "next batch", "encode", "send", "saving", "evaluating"}


def spans(folder):
    """Process and lane -> spans."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {
        (each["pid"], each["tid"], each["name"]): each["args"]["name"]
        for each in events
        if each["ph"] == "M"
    }
    found = collections.defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            process = names[each["pid"], 0, "process_name"]
            lane = names[each["pid"], each["tid"], "thread_name"]
            found[process, lane].append(each)
    return found


def test_every_process_and_direction_of_the_line_has_a_lane(split):
    found = spans(split[0])
    assert set(found) == {
        ("discriminator", "loop"),
        ("generator:0", "loop"),
        ("generator:1", "loop"),
        ("discriminator", "line from generator:0"),
        ("discriminator", "line from generator:1"),
    }
    assert {each["name"] for each in found["generator:0", "loop"]} >= LOOPS
    of_discriminator = {each["name"] for each in found["discriminator", "loop"]}
    assert of_discriminator >= {"compute", "wait", "receive", "decode", "saving"}
    steps = [
        each["args"]["step"]
        for each in found["discriminator", "line from generator:1"]
        if each["name"] == "wire tokens"
    ]
    assert steps == list(range(1, 6))


def test_spans_of_a_lane_lie_within_each_other_or_apart(split):
    for lane in spans(split[0]).values():
        open_until = []
        for each in sorted(lane, key=lambda each: (each["ts"], -each["dur"])):
            begin, end = each["ts"], each["ts"] + each["dur"]
            while open_until and open_until[-1] <= begin + 1:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1  # microseconds
            open_until.append(end)


def test_the_parts_of_the_time_add_up_to_it(split):
    summary = json.loads((split[0] / "summary.json").read_text())
    for cluster in summary["clusters"]:
        time = cluster["time"]
        named = sum(time["parts"].values()) - time["parts"]["other"]
        assert 0.97 * time["seconds"] <= named <= 1.001 * time["seconds"]
        assert time["seconds"] == pytest.approx(cluster["seconds"], rel=0.03)
    assert "Where the time went:" in split[1]


def test_the_bytes_are_those_that_the_kernel_counts(split):
    summary = json.loads((split[0] / "summary.json").read_text())
    for cluster in summary["clusters"]:
        for line in cluster["time"]["lines"].values():
            counted = line["frames"] + line["tls"]
            assert line["kernel_sent"] > 0
            # A Ping may be counted here, and not sent yet.
            assert counted == pytest.approx(line["kernel_sent"], rel=0.01, abs=100)


@pytest.mark.usefixtures("signals")
def test_a_missing_peer_is_an_error_after_the_timeout(
    runs, vocabulary, monkeypatch, capsys
):
    monkeypatch.chdir(runs.folder)
    given = {"cluster": "generator:0", "peer": f"127.0.0.1:{ports.free_port()}"}
    given |= {"vocabulary": vocabulary, "connect_timeout": 1, "workdir": "alone"}
    start = time.monotonic()
    with flagsaver.flagsaver():
        given |= {"steps": 5, "tls": "off"}
        given |= {"devices_per_cluster": 0, "batch_size": 8}  # all that are here
        configured.parse(config, **runs.flags() | given)
        assert process_lib.guarded(pretrain_m3.main) == process_lib.ENDED_BY_PEER
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: discriminator (nobody answers at 127.0.0.1:")
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_keeps_what_was_saved(runs):
    """The learning rate is 0 at step 1, and absurd at step 2."""
    given = {"generators": "en", "task_mix": "mrtd", "learning_rate": 1e30}
    status, output = runs.run(workdir="diverged", steps=9, checkpoint_every=1, **given)
    assert status == 1, output
    words = r"error: (generator:0|discriminator): step 2 has the loss [\d.]+, but its"
    first = re.search(words, output)
    assert first, output
    checkpoints = {
        path.parent.parent.name: [each.name for each in path.parent.glob("0*")]
        for path in (runs.folder / "diverged").glob("*/checkpoints/0*")
    }
    assert checkpoints[first[1].replace(":", "-")] == ["00000001"]
    assert all(steps == ["00000001"] for steps in checkpoints.values())
    assert not (runs.folder / "diverged" / "discriminator" / "encoder").exists()
