import itertools

import pytest

from nebula_jax.communication.wire import frames, states
from nebula_jax.communication.wire.states import Phase, Role, State

KINDS = [kind for kind in frames.KINDS if kind not in frames.UNNUMBERED]


def after(*messages):
    """The states after messages, each a sender and a kind."""
    reached = states.STARTED
    for sender, kind in messages:
        reached = states.advance(reached, sender, kind)
    return reached


GREETED = [(role, frames.Hello) for role in Role]


def test_a_welcome_opens_both_directions():
    reached = after(*GREETED, (Role.LISTENER, frames.Welcome))
    assert reached == {Role.LISTENER: State.OPEN, Role.CONNECTOR: State.OPEN}


def test_a_welcome_does_not_stand_for_the_connectors_hello():
    reached = after(GREETED[0], (Role.LISTENER, frames.Welcome))
    assert reached[Role.CONNECTOR] is State.START


@pytest.mark.parametrize(
    ("sender", "state", "kind"), [*itertools.product(Role, State, KINDS)]
)
def test_what_the_table_does_not_name_is_out_of_place(sender, state, kind):
    reached = {sender: state, sender.other: State.OPEN}
    allowed = states.TRANSITIONS[sender][state]
    if kind in allowed:
        assert states.advance(reached, sender, kind)[sender] is allowed[kind]
        return
    with pytest.raises(states.OutOfPlace, match=f"{kind.__name__} {state}"):
        states.advance(reached, sender, kind)


@pytest.mark.parametrize(("sender", "state"), [*itertools.product(Role, State)])
def test_an_abort_ends_its_senders_direction_in_every_state(sender, state):
    reached = {sender: state, sender.other: State.OPEN}
    reached = states.advance(reached, sender, frames.Abort)
    assert reached == {sender: State.ENDED, sender.other: State.OPEN}


@pytest.mark.parametrize(("phase", "kind"), [*itertools.product(Phase, frames.KINDS)])
def test_open_is_the_first_message_of_a_connection_and_abort_its_last(phase, kind):
    expected = {
        (Phase.OPENING, frames.Open): Phase.RUNNING,
        (Phase.OPENING, frames.Abort): Phase.NONE,
        (Phase.RUNNING, frames.Abort): Phase.NONE,
    }.get((phase, kind))
    if phase is Phase.RUNNING and kind not in (frames.Open, frames.Abort):
        expected = Phase.RUNNING
    if expected is not None:
        assert states.advance_phase(phase, kind) is expected
        return
    with pytest.raises(states.OutOfPlace, match=f"{kind.__name__} {phase}"):
        states.advance_phase(phase, kind)
