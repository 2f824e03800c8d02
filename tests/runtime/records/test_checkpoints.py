import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nebula_jax
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import activity
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime.records import checkpoints, progress
from nebula_jax.training import checkpoint, checkpoint_files


def test_a_run_goes_on_from_the_newest_step_that_all_have():
    steps = {"d": [100, 200], "g0": [100, 200, 300], "g1": [200, 300]}
    assert checkpoints.newest_of_all(steps, every=100) == 200
    assert checkpoints.newest_of_all({"d": [], "g0": []}, every=100) == 0
    # It ended before its first common checkpoint: it begins anew.
    assert checkpoints.newest_of_all({"d": [], "g0": [100]}, every=100) == 0


def test_a_cluster_far_beyond_the_first_common_checkpoint_is_not_begun_anew():
    """As far as 3 steps ahead of its peer, one of them not known to be done yet."""
    steps = {"d": [], "g0": [14]}
    assert checkpoints.newest_of_all(steps, every=10, window=3) == 0
    with pytest.raises(checkpoint.CheckpointError, match="g0 has 15"):
        checkpoints.newest_of_all({"d": [], "g0": [15]}, every=10, window=3)


def test_checkpoints_are_not_thrown_away_because_one_cluster_lost_its_own():
    words = "no step is saved in all clusters .d has 800, 900; g0 has none."
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoints.newest_of_all({"d": [800, 900], "g0": []}, every=100)


SETTINGS = {"--steps": 9}


def opened(workdir, fingerprints=None, name="source", every=100, **hooks):
    return checkpoints.Checkpoints(
        workdir, name, SETTINGS, every=every, fingerprints=fingerprints, **hooks
    )


def save(workdir, fingerprints, name="source"):
    """A checkpoint of step 1 in the run's folder."""
    opened(workdir, fingerprints, name).save(1, {"a": jnp.ones(3)})


def test_what_a_cluster_itself_had_must_be_as_it_was(tmp_path):
    save(tmp_path, {"text": "abc", "model": "def"})
    opened(tmp_path, {"text": "abc", "model": "def"})
    checkpoints.check_same_run(tmp_path, "source", SETTINGS, {"model": "def"})
    checkpoints.check_same_run(tmp_path, "source", SETTINGS)
    words = "holds a run with text=abc, this one has xyz; name another workdir"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        opened(tmp_path, {"text": "xyz"})


def test_a_process_reports_that_it_saves_while_it_does(tmp_path, monkeypatch):
    work = activity.Work()
    reported = []

    def save(*args):
        del args
        reported.append(work.report(False).activity)

    monkeypatch.setattr(checkpoint, "save", save)
    saved = checkpoints.Checkpoints(tmp_path, "source", SETTINGS, every=2, work=work)
    work.step_done()
    saved.after(1, {})
    saved.after(2, {})
    reported.append(work.report(False).activity)
    assert reported == [activity.Activity.SAVING, activity.Activity.COMPUTING]


def test_a_run_with_other_settings_is_refused(tmp_path):
    save(tmp_path, {})
    words = "holds a run with --steps=9, this one has 8"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoints.Checkpoints(tmp_path, "source", {"--steps": 8}, every=1)


@pytest.mark.parametrize("name", ["--steps", "steps"])
def test_a_run_goes_on_to_more_steps_and_says_what_follows(tmp_path, capsys, name):
    state = {"a": jnp.ones(3)}
    first = checkpoints.Checkpoints(tmp_path, "source", {name: 9}, every=1)
    first.save(9, state)
    fresh = plan_of(0.0)
    longer = checkpoints.Checkpoints(tmp_path, "source", {name: 12}, every=1)
    restored, _ = longer.restore(longer.newest, fresh)
    words = "going on after step 9, to 12 in place of 9 (steps): a learning rate that"
    assert words in capsys.readouterr().err
    longer.save(10, restored)
    again = checkpoints.Checkpoints(tmp_path, "source", {name: 12}, every=1)
    again.restore(10, fresh)
    assert "going on after step 10\n" in capsys.readouterr().err
    with pytest.raises(checkpoint.CheckpointError, match="steps=12, this one has 9"):
        checkpoints.Checkpoints(tmp_path, "source", {name: 9}, every=1)


def test_a_reader_finds_the_newest_step_of_all_clusters(tmp_path):
    for name, steps in (("source", (1, 2, 3)), ("target", (1, 2))):
        for step in steps:
            opened(tmp_path, name=name).save(step, {"a": jnp.ones(3)})
    assert checkpoints.newest_in_all(tmp_path, ["source"]) == 3
    assert checkpoints.newest_in_all(tmp_path, ["source", "target"]) == 2
    words = r"no step is saved in all clusters \(source has 1, 2, 3; x has none\)"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoints.newest_in_all(tmp_path, ["source", "x"])


def test_a_run_of_another_version_is_refused(tmp_path, monkeypatch):
    """Others may compute other numbers; those before 0.3.0 did not record theirs."""
    monkeypatch.setattr(nebula_jax, "__version__", "0.2.0")
    save(tmp_path, {})
    monkeypatch.undo()
    words = f"run with nebula_jax 0.2.0, this one has {nebula_jax.__version__}; name"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        opened(tmp_path)
    about = {"cluster": "source", "settings": SETTINGS, "fingerprints": {}}
    found = checkpoints.difference(about, "source", SETTINGS, {})
    assert found.startswith("nebula_jax before 0.3.0, this one has ")


def test_what_is_learned_of_the_peer_must_be_as_it_was(tmp_path):
    peer = {"the peer's text": "abc"}
    first = opened(tmp_path)
    first.add_fingerprints(peer)
    first.save(1, {"a": jnp.ones(3)})
    again = opened(tmp_path)
    again.add_fingerprints(peer)
    with pytest.raises(checkpoint.CheckpointError, match="the peer's text=abc"):
        again.add_fingerprints({"the peer's text": "xyz"})


def test_files_of_another_cluster_are_not_ones_own(tmp_path):
    save(tmp_path, {}, "target")
    (tmp_path / "target").rename(tmp_path / "source")
    with pytest.raises(checkpoint.CheckpointError, match="cluster=target, this"):
        checkpoints.check_same_run(tmp_path, "source", SETTINGS)


def test_a_state_goes_into_a_checkpoint_with_its_codecs_and_comes_back(tmp_path):
    mesh = mesh_lib.make_mesh(jax.devices()[:1], 1)
    start = {"w": jnp.arange(3.0)}
    plan = mesh_lib.sharded_init_from_arrays(mesh, lambda: start)
    assert plan.init()["w"] is not start["w"]  # a step may use it up
    codecs = [{"rest": jnp.zeros(2)}, ()]
    both = mesh_lib.sharded_init_with_codecs(plan, mesh, codecs)
    saved = opened(tmp_path)
    fresh, position = saved.restore(0, both)
    assert position is None
    moved = jax.tree.map(lambda leaf: leaf + 1, fresh)
    saved.save(4, moved, position=7)
    restored, position = opened(tmp_path).restore(4, both)
    assert position == 7
    jax.tree.map(np.testing.assert_array_equal, restored, moved)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)


@pytest.mark.parametrize(("last", "want"), [(6, [3, 6]), (7, [3, 6, 7]), (0, [])])
def test_due_steps_and_the_last_are_saved_once(tmp_path, last, want):
    saved = opened(tmp_path, every=3)
    for step in range(1, last + 1):
        saved.after(step, {"a": jnp.ones(3)}, lambda step=step: step)
    saved.at_end(last, {"a": jnp.ones(3)}, lambda: last)
    assert saved.steps == want
    assert opened(tmp_path, every=3).newest == max(want, default=0)


def test_a_run_that_goes_on_sets_later_checkpoints_aside(tmp_path):
    mesh = mesh_lib.make_mesh(jax.devices()[:1], 1)
    plan = mesh_lib.sharded_init_from_arrays(mesh, lambda: {"a": jnp.zeros(3)})
    saved = opened(tmp_path, every=1)
    for step in (1, 2, 3):
        saved.after(step, {"a": jnp.full(3, float(step))})
    state, _ = saved.restore(2, plan)
    assert float(state["a"][0]) == 2
    assert saved.steps == opened(tmp_path).steps == [1, 2]
    assert (tmp_path / "source" / "checkpoints" / "00000003.later").is_dir()
    saved.at_end(2, state)  # no step was taken: there is nothing to save
    assert saved.steps == [1, 2]


def plan_of(value):
    mesh = mesh_lib.make_mesh(jax.devices()[:1], 1)
    return mesh_lib.sharded_init_from_arrays(mesh, lambda: {"a": jnp.full(3, value)})


@pytest.mark.parametrize("is_root", [True, False])
def test_each_process_saves_the_last_step_that_another_cluster_lacks(
    tmp_path, monkeypatch, is_root
):
    """Or the root would wait for the others, which would not come."""
    for step in (40, 80, 90):
        opened(tmp_path, every=40).save(step, {"a": jnp.full(3, float(step))}, step)
    of_root, gathered = iter([b"[40, 80, 90]", b"80"]), []

    def from_root(own, like):
        return own if is_root else np.zeros(like.shape, like.dtype)

    def to_root(state):
        gathered.append(state)
        return state if is_root else None

    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr(ranks, "is_root", lambda: is_root)
    monkeypatch.setattr(ranks, "bytes_from_root", lambda data: data or next(of_root))
    monkeypatch.setattr(ranks, "from_root", from_root)
    monkeypatch.setattr(ranks, "to_root", to_root)
    saved = opened(tmp_path, every=40)
    assert saved.steps == [40, 80, 90]
    state, position = saved.restore(80, plan_of(0.0))
    assert position == 80
    assert saved.steps == [40, 80]
    saved.at_end(90, state, lambda: 90)
    assert len(gathered) == 1
    assert saved.steps == [40, 80, 90]


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("about", [{"a": 1}, {"settings": [], "fingerprints": {}}])
def test_a_checkpoint_without_settings_is_damaged(tmp_path, about):
    opened(tmp_path).save(1, {"a": jnp.ones(3)})
    (folder,) = tmp_path.rglob("00000001")
    digests = checkpoint_files.decode_manifest(
        (folder / "manifest.json").read_bytes(), 1
    )
    data = checkpoint_files.encode_manifest(1, about, digests.files)
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match="with no settings"):
        opened(tmp_path)


def test_a_cluster_does_not_give_up_its_checkpoints_because_a_peer_wants_it(tmp_path):
    saved = opened(tmp_path, every=2)
    for step in (2, 4, 6):
        saved.save(step, {"a": jnp.ones(3)})
    before = files_of(tmp_path)
    for step, words in (
        (0, "no step is saved in all clusters .another cluster has none; source has 2"),
        (5, "the run is to go on after step 5; source has 2, 4, 6"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=words):
            saved.restore(step, plan_of(1.0))
    assert files_of(tmp_path) == before


def test_a_cluster_whose_every_checkpoint_is_later_than_the_run_joins_it(tmp_path):
    """The run has gone back to another one's step, and sends its state to this one."""
    saved = opened(tmp_path)
    saved.save(200, {"a": jnp.ones(3)})
    state, position = saved.restore(0, plan_of(1.0), is_behind=True)
    assert (float(state["a"][0]), position) == (1.0, None)
    assert saved.steps == []
    folder = tmp_path / "source" / "checkpoints" / "00000200.later"
    assert (folder / "manifest.json").is_file()  # and its files are still there


def test_nothing_is_saved_that_must_not_be(tmp_path):
    saved = opened(tmp_path, every=1)
    saved.after(1, {"a": jnp.ones(3)})

    def refuse(state):
        raise progress.NonfiniteError("step 2")

    saved = opened(tmp_path, every=1, before_save=refuse)
    for save in (saved.after, saved.at_end):
        with pytest.raises(progress.NonfiniteError):
            save(2, {"a": jnp.ones(3)})
    assert opened(tmp_path).steps == [1]
