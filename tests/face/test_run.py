"""A Run says what to change where its calls cannot work."""

import jax
import jax.numpy as jnp
import numpy as np
import ports
import pytest

import nebula_jax as nebula
from nebula_jax.commands import command_line
from nebula_jax.communication import bridge
from nebula_jax.face import checks
from nebula_jax.face.checks import Misuse

ONE = {"w": jnp.ones(2)}
NAMES = "front", "back"


def alone(folder, steps=4, every=2, clusters=NAMES):
    return nebula.Run(
        clusters[0],
        clusters,
        steps=steps,
        workdir=folder,
        checkpoint_every=every,
        tls="off",
    )


def train(run, values=ONE, metrics=None):
    found = run.restore(values)
    for step in run.steps():
        run.done(step, found, {"loss": 1.0} if metrics is None else metrics)
    return found


def test_a_run_goes_on_where_it_was(tmp_path):
    for steps in ([1, 2, 3, 4], []):
        taken = []
        with alone(tmp_path) as run:
            run.restore(ONE)
            for step in run.steps():
                taken.append(step)
                run.done(step, ONE)
            assert run.exit_status() == 0
        assert taken == steps


def test_steps_need_restore_and_done(tmp_path):
    with alone(tmp_path) as run, pytest.raises(Misuse, match=r"call run\.restore"):
        next(run.steps())
    with alone(tmp_path / "b") as run:
        run.restore(ONE)
        with pytest.raises(Misuse, match=r"run\.done\(1, values, metrics\) was not"):
            list(run.steps())


def taken(folder, batch_of, **given):
    """The steps of a run with their batches."""
    with alone(folder, **given) as run:
        run.restore(ONE)
        found = []
        for step, batch in run.batches(batch_of):
            found.append((step, batch.tolist()))
            run.done(step, ONE)
    return found


def killed_after(last, batch_of):
    """A function of batches, with which a process ends after a step."""

    def of(step):
        if step > last:
            raise KeyboardInterrupt
        return batch_of(step)

    return of


def test_a_batch_of_the_step_alone_comes_with_it_after_a_resume_too(tmp_path):
    def rows(step):
        return np.random.default_rng(step).integers(9, size=2)

    whole = taken(tmp_path / "whole", rows, steps=6)
    with pytest.raises(KeyboardInterrupt):
        taken(tmp_path / "b", killed_after(5, rows), steps=6)
    assert whole[4:] == taken(tmp_path / "b", rows, steps=6)
    assert whole == [(step, rows(step).tolist()) for step in range(1, 7)]


def test_a_digest_tells_values_shapes_types_and_keys_apart():
    batches = [
        {"x": np.zeros(4, np.int32)},
        {"x": jnp.zeros(4, jnp.bfloat16)},
        {"x": np.zeros((2, 2), np.int32)},
        {"x": [0, 0, 0, 1]},
        [jax.random.key(1), None],
        [jax.random.key(2), "a name"],
    ]
    assert len({checks.digest(each) for each in batches}) == len(batches)
    assert checks.digest(batches[0]) == checks.digest({"x": jnp.zeros(4, jnp.int32)})


def test_batches_without_a_seed_are_refused_at_the_first_step(tmp_path):
    random = np.random.default_rng()
    with pytest.raises(Misuse, match=r"two batches for step 1; .* seeded by the step"):
        taken(tmp_path, lambda step: random.normal(size=3))


def test_batches_that_are_others_after_a_resume_are_refused(tmp_path):
    """As with a seed of the process, or other data: the same within a process alone."""
    with pytest.raises(KeyboardInterrupt):
        taken(tmp_path, killed_after(3, np.array))
    with pytest.raises(Misuse, match="the batch of step 2 is another one than before"):
        taken(tmp_path, lambda step: np.array(step + 7))


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_function_that_returns_too_early_is_no_success(tmp_path, is_begun):
    with alone(tmp_path) as run:
        if is_begun:
            run.restore(ONE)
            for step in run.steps():
                run.done(step, ONE)
                break
        with pytest.raises(Misuse, match="front returned before"):
            run.exit_status()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"w": jnp.ones(3)}, r"0[/.]w is \[3\], and was \[2\]"),
        ((ONE, ONE), "missing"),
        (({},), "missing"),
    ],
)
def test_done_takes_what_restore_took(tmp_path, values, words):
    with alone(tmp_path) as run:
        run.restore(ONE)
        step = next(run.steps())
        with pytest.raises(Misuse, match=words):
            run.done(step, values)


def test_other_values_than_the_runs_are_named(tmp_path):
    with alone(tmp_path) as run:
        train(run)
    with alone(tmp_path) as run, pytest.raises(Misuse, match="name another workdir"):
        run.restore({"w": jnp.ones(3)})


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ([1.0], "a dict of numbers, not a list"),
        ({"loss": jnp.ones(3)}, r"loss is no number but .* of shape \[3\]"),
        ({"name": "x"}, "name is no number"),
    ],
)
def test_metrics_are_numbers(tmp_path, metrics, words):
    with alone(tmp_path) as run, pytest.raises(Misuse, match=words):
        train(run, metrics=metrics)


def test_names_are_those_of_the_run(tmp_path):
    with alone(tmp_path) as run:
        for connect in (run.dial, run.listen):
            with pytest.raises(Misuse, match="the other clusters are back"):
                connect("bak").__enter__()


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [
        (lambda run: run.listen("back"), {}, "needs listen=HOST:PORT"),
        (lambda run: run.meet(), {}, "needs listen=HOST:PORT"),
        (lambda run: run.dial("back"), {}, "needs peer=HOST:PORT of back"),
        (lambda run: run.dial("back"), {"peer": "h:1", "tls": "auto"}, "needs tls="),
    ],
)
def test_what_a_connection_lacks_is_named_before_anybody_waits(
    tmp_path, call, given, words
):
    given = {"steps": 1, "workdir": tmp_path, "tls": "off"} | given
    with (
        nebula.Run("front", NAMES, **given) as run,
        pytest.raises(nebula.errors.SettingsError, match=f"^cluster=front {words}"),
    ):
        call(run).__enter__()


def test_done_is_of_the_step_at_hand(tmp_path):
    with alone(tmp_path) as run:
        run.restore(ONE)
        with pytest.raises(Misuse, match=r"run\.done\(2, \.\.\.\) in step 1"):
            run.done(next(run.steps()) + 1, ONE)


@pytest.mark.parametrize("own", ["front", "back"])
def test_who_waits_in_vain_is_told_what_the_other_has_to_call(tmp_path, own):
    given = {"steps": 1, "workdir": tmp_path, "tls": "off", "connect_timeout": 0.5}
    at = dict.fromkeys(("listen", "peer"), f"127.0.0.1:{ports.free_port()}")
    with nebula.Run(own, NAMES, **given, **at) as run:
        call = run.dial("back") if own == "front" else run.listen("front")
        words = r"back call run.listen\('front'\)|front call run.dial\('back'\)"
        with pytest.raises(nebula.errors.PeerAbsent, match=rf"; does ({words})\?$"):
            call.__enter__()


def test_other_roles_are_not_told_as_a_flag(tmp_path):
    hellos = []
    for names in (("front", "back"), ("rear", "front")):
        with alone(tmp_path / names[0], clusters=names) as run:
            hellos.append(run._hello(()))
    with pytest.raises(bridge.Mismatch) as caught:
        command_line.with_flags(lambda: bridge.check_agreement(*hellos))
    words = "rear has roles=rear,front, front has roles=front,back"
    assert str(caught.value).startswith(words)


def test_what_a_loop_adds_is_compared_too_unless_it_comes_too_late(tmp_path):
    hellos = []
    for digest in ("a1", "b2"):
        with alone(tmp_path / digest) as run:
            run.compare(vocabulary=digest)
            hellos.append(run._hello(()))
            train(run)
            with pytest.raises(Misuse, match=r"run\.compare\(text\) is for settings"):
                run.compare(text=digest)
    with pytest.raises(bridge.Mismatch, match=r"has vocabulary=b2, .* vocabulary=a1"):
        bridge.check_agreement(*hellos)
    with alone(tmp_path / "a1") as run:
        run.compare(vocabulary="c3")  # the run that is there had another
        with pytest.raises(nebula.errors.NebulaError, match="vocabulary"):
            train(run)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    with (
        alone(tmp_path) as run,
        pytest.raises(nebula.errors.NebulaError, match="the loss of step 1 is nan"),
    ):
        train(run, metrics={"loss": jnp.nan})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 0}, "^steps=0: must be at least 1"),
        ({"every": 0}, "^checkpoint_every=0: must be at least 1"),
        ({"clusters": ("a/b", "c")}, "^'a/b' is no cluster's name"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_words(tmp_path, given, words):
    with pytest.raises(nebula.errors.SettingsError, match=words):
        alone(tmp_path, **given)
