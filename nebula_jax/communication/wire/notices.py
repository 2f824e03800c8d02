"""The messages of a peer beside its tensors, as far as a link keeps them."""

from nebula_jax.communication.wire import frames


class Notices:
    """The latest of what a peer has sent about the run."""

    def __init__(self) -> None:
        self.welcome: int | None = None
        """The step of its Welcome, once that has come."""
        self.formats = b""
        """The description of its channels that came with it."""
        self.step_done = 0
        """The step of its latest token."""
        self.stop: int | None = None
        """The step of its last Stop."""
        self.has_ended = False
        """True once it has sent End."""

    def take(self, message: frames.Message) -> None:
        """Takes a message of the peer that is no tensor."""
        match message:
            case frames.End():
                self.has_ended = True
            case frames.StepDone(step=step):
                self.step_done = max(self.step_done, step)
            case frames.Stop(step=step):
                self.stop = step
            case frames.Welcome(step=step, channels=described):
                self.formats = described
                self.welcome = self.step_done = step
