"""Several pairs train one translator: over clusters what they do in one process."""

import json
import shutil
import signal
import time

import jax
import numpy as np
import optax
import pytest
import tiny_runs
import tiny_translations

from experiments import translate as translate_command
from experiments.abnet import (
    checks,
    config,
    data,
    hello,
    meeting,
    models,
    pairs,
    replicas,
    report,
    several,
    target_model,
    whole,
)
from nebula_jax import errors
from nebula_jax.communication import bridge
from nebula_jax.communication.wire import frames
from nebula_jax.models import transformer
from nebula_jax.parallel import pace
from nebula_jax.parallel.local_steps import messages
from nebula_jax.runtime.life import process
from nebula_jax.training import checkpoint

STEPS, EVERY = 32, 4
CLUSTERS = ("target-0", "target-1", "source-0", "source-1")
# Local steps that average gradients: one step, and then the mean of the parameters.
EACH_STEP = {
    "inner_steps": 1,
    "outer_learning_rate": 1,
    "outer_momentum": 0,
    "mixing": 0,
    "delta_codec": "identity",
}
# Rounds under way while the clusters train, and codecs with a memory, of both kinds.
RUN = {
    **tiny_translations.ALIKE,
    "steps": STEPS,
    "checkpoint_every": EVERY,
    "forward_codec": "from_step(3,error_feedback(int8(8)))",
    "backward_codec": "delta(fp16,60)",
    "replicas": 2,
    "inner_steps": 3,
    "delay": 2,
    "delta_codec": "error_feedback(e3m0(8))",
}
SLOWLY = {"wan": "10mbit,20ms"}  # so that a run can be disturbed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that share text and models; each test names its own workdir."""
    return tiny_translations.Translations(tmp_path_factory.mktemp("translations"))


@pytest.fixture
def trained_here(runs, monkeypatch):
    """Trains in this process, by plain descent; returns what each step saved."""
    monkeypatch.chdir(runs.folder)
    monkeypatch.setattr(process.Interrupt, "install", lambda self: self)
    monkeypatch.setattr(config.Agreed, "is_evaluated", lambda self, step: False)
    monkeypatch.setattr(models, "make_optimizer", lambda agreed: optax.sgd(0.05))

    def train(workdir, **flags):
        run = tiny_translations.run(
            **runs.flags() | flags, workdir=workdir, cluster="whole"
        )
        checks.check(run)
        folders = data.split(run)
        target_model.prepare(run, folders[1])
        loop = several if run.agreed.replicas > 1 else whole
        assert loop.train(run, folders) == 0
        found = {}
        for path in (runs.folder / workdir).glob("*/checkpoints"):
            for step in range(1, run.agreed.steps + 1):
                found[path.parent.name, step] = checkpoint.read(path, step)
        return found

    return train


def test_pairs_that_meet_at_every_step_are_one_pair_with_the_joint_batch(trained_here):
    """Within 1e-6: A - mean of (A - own) is not rounded as one pair's step is.

    Sentences differ in length, so that the shares of a batch differ in tokens. The two
    sides of one pair are differentiated as one model, without a cut.
    """
    flags = {
        **{"source_model": "models/shallow_spanish", "length_buckets": "16"},
        **{"target_model": "models/shallow_english", "steps": 3},
        **{"checkpoint_every": 1},
    }
    one = trained_here("one", batch_size=8, **flags)
    two = trained_here("two", batch_size=4, replicas=2, **flags | EACH_STEP)
    for side, name in enumerate(("source", "target")):
        began, want = (one["whole", step][side]["state"]["params"] for step in (1, 3))
        first, second = (two[f"{name}-{k}", 3]["state"]["params"] for k in (0, 1))
        tiny_translations.assert_same(first, second)
        tiny_translations.assert_close(first, want, atol=1e-6)
        # Training has moved them by far more.
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), want, began)
        assert max(jax.tree.leaves(moved)) > 1e-3, moved


def agreed_of(**values):
    """The shared settings of a tiny run of two pairs."""
    return tiny_translations.run(
        **tiny_translations.TINY | {"replicas": 2, "workdir": "w"} | values
    ).agreed


def test_who_meets_whom():
    agreed = agreed_of(replicas=3)
    assert pairs.names(agreed, "source") == ["source:0", "source:1", "source:2"]
    everybody = pairs.clusters(agreed)
    assert everybody[0] == "target:0"
    for one in everybody:
        met = set(meeting.met_by(agreed, one)) - {one}
        same_side = {each for each in everybody if each[:6] == one[:6]} - {one}
        assert met == same_side | {pairs.other_half(one)}
    dials = meeting.dials(agreed)
    assert dials["target:2"] == ["target:0", "target:1"]
    assert dials["source:2"] == ["target:2", "source:0", "source:1"]
    # Of two that meet one dials, and no other way round.
    links = {frozenset((one, each)) for one in everybody for each in dials[one]}
    assert len(links) == sum(map(len, dials.values())) == 3 + 2 * 3
    assert meeting.dials(agreed_of(replicas=1)) == {"target": [], "source": ["target"]}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"hub": "target:0"}, "--hub=target:0 is not for train_abnet"),
        ({"replicas": 1, "quorum": 1}, "--quorum=1 is not for train_abnet"),
        ({"sync": "allreduce"}, "--sync=allreduce is not for --replicas=2"),
        ({"delta_weights": "tokens"}, "--delta_weights=tokens is not for"),
        ({"inner_steps": 4, "delay": 4}, "--delay must be below the 4 steps"),
        ({"delta_codec": "from_step(3,fp16)"}, "chooses among codecs"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, words):
    flags = {"replicas": 2, "workdir": "w", "cluster": "whole"} | flags
    run = tiny_translations.run(**tiny_translations.TINY | flags)
    with pytest.raises(errors.SettingsError) as refused:
        checks.check(run)
    assert words in str(refused.value)


def test_a_cluster_that_there_is_not_is_refused():
    for replicas_, cluster in ((1, "target:0"), (2, "target"), (2, "source:2")):
        run = tiny_translations.run(replicas=replicas_, cluster=cluster, workdir="w")
        with pytest.raises(errors.SettingsError, match=f"--cluster={cluster}: expec"):
            pairs.check_cluster(run)
        pairs.check_cluster(run.with_local(cluster=pairs.clusters(run.agreed)[-1]))


def test_one_pair_compares_what_it_did_before_there_were_several():
    one, two = (config.settings(agreed_of(replicas=number)) for number in (1, 2))
    assert set(two) - set(one) >= {"--replicas", "--sync", "--inner_steps", "--hub"}
    assert {"--batch_size", "--forward_codec", "--seed"} <= set(one)
    assert one.items() <= two.items()


def test_clusters_of_a_side_need_the_same_text_and_model():
    shape = transformer.Config(60, 2, 16, 2, 32, 16)

    def hello_of(cluster, **fingerprints):
        run = tiny_translations.run(replicas=2, cluster=cluster, workdir="w")
        return hello.hello(run, [], shape, {}, fingerprints)

    own = hello_of("source:0", source_model="a", source_text="b")
    hello.check_same_side(own, hello_of("source:1", source_model="a", source_text="b"))
    for other in (
        hello_of("source:1", source_model="a", source_text="c\x1b"),
        hello_of("source:1", source_model="a"),
        frames.Hello("source:1", "1", {}, (), {"fingerprints": 3}),
    ):
        with pytest.raises(bridge.Mismatch, match="source:1 has source_") as refused:
            hello.check_same_side(own, other)
        assert "\x1b" not in str(refused.value)


class Line:
    """A pair's link, as its target has it."""

    def __init__(self):
        self.stop_step, self.sent = None, []

    def step_done(self, step):
        self.sent.append(("done", step))

    def stop(self, step):
        self.sent.append(("stop", step))


@pytest.mark.parametrize(("every", "delay"), [(1, 0), (2, 1), (3, 2), (5, 0), (8, 3)])
@pytest.mark.parametrize("who", ["source", "target"])
def test_all_pairs_end_after_the_same_step(every, delay, who):
    """A source or a target requests it; the heads are those that rounds would bring."""
    for requested in range(1, 2 * every + 4):
        assert_all_end(every, delay, who, requested)


def assert_all_end(every, delay, who, requested):
    """Asserts that two targets and their sources end together, and soon."""
    agreed = agreed_of(inner_steps=every, delay=delay, steps=40)
    local_steps, lines = agreed.local_steps(), [Line(), Line()]
    is_requested = [False, False]
    endings = [
        replicas.Ending(agreed, line, 0, lambda pair=pair: is_requested[pair])
        for pair, line in enumerate(lines)
    ]
    leads = [
        pace.Lead([ending.follower], 0, agreed.steps, 0, ending.is_due, lambda text: 0)
        for ending in endings
    ]
    heads, taken = {}, [[], []]
    for steps in zip(*leads, strict=True):  # an error if one goes on
        for pair, step in enumerate(steps):
            taken[pair].append(step)
            leads[pair].done(step)
            if step == requested and pair == 1:
                is_requested[1] = who == "target"
                lines[1].stop_step = 0 if who == "source" else None
        step = steps[0]
        if (fragment := local_steps.sent_after(step)) is not None:
            found = (ending.now() for ending in endings)
            heads[step] = [messages.Head(step, fragment, 0, 0, *each) for each in found]
        for ending in endings:
            is_applied = local_steps.applied_after(step) is not None
            ending.take(step, heads[step - delay] if is_applied else [])
    (last,) = {each[-1] for each in taken}
    assert requested < last <= requested + 2 * every + 1
    assert not local_steps.is_under_way(last)
    for line in lines:
        assert line.sent[-2:] == [("stop", last), ("done", last)]


def test_bytes_of_both_kinds_are_those_of_all_pairs():
    source = {
        **{"first_step": 1, "last_step": 2, "width": 4},
        "ledger": {"sent hidden[8]": [4, 100], "received gradient[8]": [4, 60]},
        "side_ledgers": {
            "source:1": {"sent delta 0 of source:0": [1, 36], "sent": [1, 9]}
        },
        "rounds": {"message_bytes": 30},
    }
    settings = {"batch_size": 8, "replicas": 2}
    one, two = (report.step_bytes([source] * n, settings, [8]) for n in (1, 2))
    assert (one["forward"], one["backward"]) == (50, 30)
    assert (two["forward"], two["backward"]) == (100, 60)
    assert one["forward_ratio"] == two["forward_ratio"] == 50 / (4 * 8 * 8 * 4)
    found = {name: source for name in CLUSTERS}
    sizes = report.delta_bytes(found, 2)
    assert sizes == {"sent": 4 * 36, "formula": 4 * 30, "per_step": 2 * 36}
    sides = {"source": {"message_bytes": 30}, "target": {"message_bytes": 30}}
    whole_ = {"first_step": 1, "last_step": 2, "rounds": sides}
    assert report.delta_bytes({"whole": whole_}, 2)["formula"] == sizes["formula"]
    assert report.delta_bytes(found, 1) == {}


# Over several processes.


@pytest.fixture(scope="module")
def in_one_process(runs):
    """A run in one process that was never stopped."""
    status, output = runs.run(workdir="whole", cluster="whole", timeout=300, **RUN)
    assert status == 0, output
    return "whole"


def assert_same(runs, workdir, other):
    """Asserts that two runs have ended the same, bit for bit."""
    for cluster in CLUSTERS:
        tiny_translations.assert_same(
            runs.state(workdir, cluster, STEPS), runs.state(other, cluster, STEPS)
        )


def steps_of(runs, workdir, cluster):
    """The steps that a cluster has saved."""
    folder = runs.folder / workdir / cluster / "checkpoints"
    return sorted(int(each.name) for each in folder.glob("[0-9]" * 8))


@pytest.mark.slow
def test_killed_clusters_of_several_pairs_change_no_number(runs, in_one_process):
    """Two pairs over encrypted lines; a target is killed, later a source."""
    run, family = runs.start_and_wait("split", 5, CLUSTERS, **RUN | SLOWLY, restart=2)
    assert not (
        runs.folder / "split" / "target-0" / "checkpoints" / "00000004"
    ).exists()
    family["target:1"].kill()
    killed = {family["source:0"].pid}
    before = max(steps_of(runs, "split", "source-0"))
    while (found := tiny_runs.family_of(run).get("source:0")) is None or (
        found.pid in killed or max(steps_of(runs, "split", "source-0")) < before + EVERY
    ):
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    found.kill()
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert "target:1 was killed by SIGKILL; all clusters start again" in output
    assert "source:0 was killed by SIGKILL; all clusters start again" in output
    for cluster in ("target:0", "target:1", "source:0", "source:1"):
        assert output.count(f"[{cluster}] going on after step") == 2
    assert_same(runs, "split", in_one_process)
    one, two = (runs.state("split", f"target-{k}", STEPS)["state"] for k in (0, 1))
    tiny_translations.assert_same(one["params"], two["params"])
    moments = [np.concatenate([*map(np.ravel, jax.tree.leaves(each["opt_state"]))])
               for each in (one, two)]  # fmt: skip
    assert not np.array_equal(*moments)
    summary = json.loads((runs.folder / "split" / "summary.json").read_text())
    assert summary["bytes"]["forward"] > 0
    assert 1 < summary["deltas"]["sent"] / summary["deltas"]["formula"] < 1.2
    assert summary["bleu"][-1].keys() == {"step", "dev", "test"}
    assert len(summary["examples"]) == 3


@pytest.mark.slow
def test_a_request_ends_all_pairs_which_go_on_from_what_all_have(runs, in_one_process):
    """A source requests it, and loses a checkpoint; in the end one process goes on."""
    flags = RUN | {"tls": "off"}
    run, family = runs.start_and_wait("stopped", 8, CLUSTERS, **flags | SLOWLY)
    family["source:1"].terminate()
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM, output
    tiny_runs.assert_all_gone(family)
    (last,) = {max(steps_of(runs, "stopped", cluster)) for cluster in CLUSTERS}
    assert 8 <= last < STEPS
    folder = runs.folder / "stopped" / "source-1" / "checkpoints"
    shutil.rmtree(folder / f"{last:08d}")
    shutil.copytree(runs.folder / "stopped", runs.folder / "moved")
    newest = max(steps_of(runs, "stopped", "source-1"))
    for workdir, cluster in (("stopped", "all"), ("moved", "whole")):
        status, output = runs.run(
            workdir=workdir, cluster=cluster, timeout=300, **flags
        )
        assert status == 0, output
        assert output.count(f"going on after step {newest}") == len(CLUSTERS)
        assert_same(runs, workdir, in_one_process)


@pytest.mark.slow
def test_mask_predict_with_joined_pairs_translates_line_by_line(runs):
    """Several buckets, sparse local steps; a run's first pair is read."""
    flags = {
        **{"steps": 4, "checkpoint_every": 4, "replicas": 2, "inner_steps": 2},
        **{"sync": "sparse", "delta_codec": "error_feedback(sparse_loco(8, 64), 0.9)"},
        **{"target_model": "models/english"},  # which is given a head
    }
    for cluster in ("whole", "all"):
        status, output = runs.run(
            workdir=f"masked-{cluster}", cluster=cluster, timeout=300, **flags
        )
        assert status == 0, output
    for cluster in CLUSTERS:
        tiny_translations.assert_same(
            runs.state("masked-all", cluster, 4), runs.state("masked-whole", cluster, 4)
        )
    assert "mlm_head" in runs.state("masked-all", "target-1", 4)["state"]["params"]
    for workdir in ("masked-all", "masked-whole"):
        trained, step = translate_command.trained_params(runs.folder / workdir, None)
        want = [runs.state(workdir, f"{side}-0", 4) for side in ("source", "target")]
        assert step == 4
        tiny_translations.assert_same(
            trained, [each["state"]["params"] for each in want]
        )
