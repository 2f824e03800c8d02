"""Local steps of the face: what a loop may forget."""

import concurrent.futures
import re
import signal

import jax.numpy as jnp
import optax
import ports
import pytest

import nebula_jax as nebula
from nebula_jax.commands import command_line
from nebula_jax.face.checks import Misuse


def test_rounds_that_restore_is_not_given_are_asked_for(tmp_path):
    """Else they would begin anew after a resume, and no stop would be agreed on."""
    state = nebula.state({"w": jnp.zeros(2)}, optax.sgd(0.1))
    given = {"steps": 2, "workdir": tmp_path, "tls": "off"}
    with nebula.Run("a", ("a",), **given) as run, run.meet() as peers:
        rounds = nebula.local_steps(run, peers, state.params, inner_steps=1)
        with pytest.raises(Misuse, match=r"run.restore\(state, rounds\)"):
            run.restore(state)
        state, rounds = run.restore(state, rounds)
        assert list(taken(run, state, rounds)) == [1, 2]
    assert run.exit_status() == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"codec": "from_step(3, int8(8))"}, "local_steps.codec=from_step.* chooses"),
        ({"inner_stepz": 3}, "local_steps has no setting inner_stepz; there are"),
        ({"codec": 3}, "local_steps.codec=3: expected a codec"),
        ({"codec": "int9"}, "local_steps: unknown codec int9"),
        ({"delay": 9}, "local_steps.delay must be below"),
        (
            {"is_trained": lambda path: "lora" in path},
            "local_steps.is_trained .* as w$",
        ),
    ],
)
def test_a_setting_is_named_as_the_scripts_and_not_as_a_flag(tmp_path, settings, words):
    given = {"steps": 2, "workdir": tmp_path, "tls": "off"}
    with nebula.Run("a", ("a",), **given) as run, run.meet() as peers:

        def begin():
            nebula.local_steps(
                run, peers, {"w": jnp.zeros(2)}, **{"inner_steps": 4, **settings}
            )

        with pytest.raises(nebula.errors.SettingsError, match=f"^{words}"):
            command_line.with_flags(begin)


def test_parameters_from_before_a_round_are_not_taken(tmp_path):
    """A loop that throws away what `after` returns would train each replica alone."""
    at = f"127.0.0.1:{ports.free_port()}"
    said = []

    def train(name, **address):
        given = {"steps": 4, "workdir": tmp_path / name, "tls": "off", **address}
        state = nebula.state({"w": jnp.ones(2)}, optax.sgd(0.1))
        with nebula.Run(name, ("a", "b"), **given) as run, run.meet() as peers:
            rounds = nebula.local_steps(run, peers, state.params, inner_steps=2)
            state, rounds = run.restore(state, rounds)
            for step in run.steps():
                state = state.apply({"w": jnp.full(2, 1.0 + (name == "b"))})
                rounds.after(step, state.params)
                try:
                    run.done(step, (state, rounds))
                except Misuse as error:
                    said.append(f"{step} {error}")
                    raise

    with concurrent.futures.ThreadPoolExecutor() as pool:
        one, two = pool.submit(train, "a", listen=at), pool.submit(train, "b", peer=at)
        assert all(each.exception() for each in (one, two))
    assert re.match("2 .*from before the round.*params=rounds.after", said[0])


def test_a_run_that_goes_on_stops_on_a_signal_as_before(tmp_path):
    for last in (3, 6):
        state = nebula.state({"w": jnp.zeros(2)}, optax.sgd(0.1))
        given = {"steps": 20, "workdir": tmp_path, "tls": "off"}
        with nebula.Run("a", ("a",), **given) as run, run.meet() as peers:
            rounds = nebula.local_steps(run, peers, state.params, inner_steps=1)
            state, rounds = run.restore(state, rounds)
            steps = []
            for step in taken(run, state, rounds):
                steps.append(step)
                if step == last:
                    signal.raise_signal(signal.SIGTERM)
            assert steps == [last - 2, last - 1, last]


def taken(run, state, rounds):
    for step in run.steps():
        yield step
        params = rounds.after(step, state.params)
        run.done(step, (state.replace(params=params), rounds))
