"""The states of a session, all that changes them, and the messages each allows."""

import enum
from collections.abc import Mapping

from nebula_jax import errors
from nebula_jax.communication.wire.frames import (
    Abort,
    End,
    Hello,
    Open,
    StepDone,
    Stop,
    Tensor,
    Welcome,
)


class OutOfPlace(errors.NebulaError):
    """A message that the present state does not allow, such as `Stop before Hello`."""


class Role(enum.StrEnum):
    """A side of the session: the connector dials, the listener welcomes it."""

    LISTENER = "listener"
    CONNECTOR = "connector"

    @property
    def other(self) -> "Role":
        """The role of the peer."""
        return Role.CONNECTOR if self is Role.LISTENER else Role.LISTENER


class State(enum.StrEnum):
    """The progress of one direction of a session."""

    START = "before Hello"
    GREETED = "after Hello"
    OPEN = "open"
    ENDED = "after End or Abort"


class Phase(enum.StrEnum):
    """The progress of the present connection."""

    NONE = "without a connection"
    OPENING = "before Open"
    RUNNING = "after Open"


# Sender -> state of its direction -> allowed message -> next state of that direction.
# Welcome opens the connector's direction as well: see `advance`.
TRANSITIONS: dict[Role, dict[State, dict[type, State]]] = {
    Role.LISTENER: {
        State.START: {Hello: State.GREETED},
        State.GREETED: {Welcome: State.OPEN},
        State.OPEN: {
            Tensor: State.OPEN,
            StepDone: State.OPEN,
            Stop: State.OPEN,
            End: State.ENDED,
        },
        State.ENDED: {},
    },
    Role.CONNECTOR: {
        State.START: {Hello: State.GREETED},
        State.GREETED: {},
        State.OPEN: {Tensor: State.OPEN, Stop: State.OPEN, End: State.ENDED},
        State.ENDED: {},
    },
}

States = Mapping[Role, State]
STARTED: States = {role: State.START for role in Role}


def advance(states: States, sender: Role, kind: type) -> States:
    """Returns the states of both directions after a message.

    Two rules stand beside TRANSITIONS: Welcome opens the connector's direction as well,
    and an Abort may be sent in any state. Raises OutOfPlace if the sender's state does
    not allow it.
    """
    state = states[sender]
    following = TRANSITIONS[sender][state].get(kind)
    if kind is Abort:
        following = State.ENDED
    if following is None:
        raise OutOfPlace(f"{kind.__name__} {state}")
    if following is state:
        return states
    states = {**states, sender: following}
    if kind is Welcome and states[Role.CONNECTOR] is State.GREETED:
        states[Role.CONNECTOR] = State.OPEN
    return states


def advance_phase(phase: Phase, kind: type) -> Phase:
    """Returns the phase of a connection after a message of the peer.

    Open is the first message on it, and Abort its last. What is numbered must be
    allowed by TRANSITIONS as well. Raises OutOfPlace if the phase does not allow it.
    """
    if phase is not Phase.NONE and kind is Abort:
        return Phase.NONE
    if phase is (Phase.OPENING if kind is Open else Phase.RUNNING):
        return Phase.RUNNING
    raise OutOfPlace(f"{kind.__name__} {phase}")
