"""Local steps of the face: what a loop may forget."""

import jax.numpy as jnp
import optax
import pytest

import nebula_jax as nebula
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


def taken(run, state, rounds):
    for step in run.steps():
        yield step
        params = rounds.after(step, state.params)
        run.done(step, (state.replace(params=params), rounds))
