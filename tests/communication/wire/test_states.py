import itertools

import pytest

from nebula_jax.communication.wire import frames, states
from nebula_jax.communication.wire.states import Phase, Role, State


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
