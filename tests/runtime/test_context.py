"""What a process of a run passes on of its settings to those who keep pace."""

import signal

import pytest

from nebula_jax.communication.wire import frames
from nebula_jax.runtime import context as context_lib

WINDOW, STEPS = 2, 20


class Link:
    """A link whose other end is as far as it is asked to be."""

    def __init__(self, stop_step=None):
        self.peer, self.stop_step = frames.Hello("other", "1", {}), stop_step
        self.waited_for, self.stopped = [], []

    def wait_for_step(self, step):
        self.waited_for.append(step)

    def step_done(self, step):
        pass

    def stop(self, step=0):
        self.stopped.append(step)


@pytest.fixture
def context(tmp_path):
    settings = context_lib.Settings(
        workdir=tmp_path, cluster="here", steps=STEPS, checkpoint_every=5, window=WINDOW
    )
    made = context_lib.Context(settings)
    yield made
    made.close()


def test_nobody_is_further_ahead_than_the_window(context):
    link = Link()
    assert list(context.follow(link)) == list(range(1, STEPS + 1))
    assert link.waited_for == [step - 1 - WINDOW for step in range(1, STEPS + 1)]


def test_a_run_ends_where_a_follower_may_be_by_then(context):
    link = Link(stop_step=0)  # it has asked for the end
    lead = context.lead([link])
    assert next(iter(lead)) == 1
    lead.done(1)
    assert link.stopped == [WINDOW + 1]  # no token has left yet


def test_a_follower_says_which_cluster_has_ended_its_run(context, capsys):
    assert list(context.follow(Link(stop_step=7))) == list(range(1, 8))
    said = "other named the last step; it says who asked to stop\n"
    assert capsys.readouterr().err == said
    for step in context.each(context.follow(Link(stop_step=7))):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)  # it has asked itself
    assert said not in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "name"), [(0, "here"), (1, "here (process 1)")])
def test_a_process_says_at_its_end_how_far_the_run_is_and_where(
    context, tmp_path, monkeypatch, capsys, rank, name
):
    monkeypatch.setattr(context_lib.ranks, "rank", lambda: rank)
    context.begin(0)
    for step in context.each(context.alone()):
        context.record.step(step, {})
    context.finish({})
    assert context.exit_status() == 0
    words = f"{name}: done after step {STEPS}; its files are in {tmp_path / 'here'}\n"
    assert capsys.readouterr().err == words
