"""A generator against a discriminator that is written down: what it sends, and when."""

import collections
import contextlib
import signal

import configured
import jax
import numpy as np
import pytest
import tiny_runs

from experiments.m3 import config, data, generator
from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime import connect

STEPS, SAVED = 4, 2


class Discriminator:
    """A link whose other end sends a step token once it has been waited for."""

    def __init__(self, start):
        self.start, self.token = start, start
        self.sent, self.waited, self.stop_step = {}, 0.0, None
        self.outages = {}
        self.ledger = collections.defaultdict(lambda: [0, 0])

    def sender(self, name, *spec, **more):
        return Sender(self, name)

    def wait_for_welcome(self, timeout):
        return self.start

    def wait_for_step(self, step):
        self.token = max(self.token, step)

    def bytes_moved(self, direction):
        return 0


class Sender:
    """A channel to that discriminator."""

    def __init__(self, link, name):
        self.link, self.name = link, name

    def send(self, step, arrays, micro_batch=0):
        assert step <= self.link.token + 1
        arrays = jax.device_get(arrays)
        self.link.sent[self.name, step, micro_batch] = arrays


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Runs a generator in this process; returns what it sent."""
    text, pieces = tiny_runs.write_text(tmp_path / "text"), tmp_path / "v.model"
    lines = language_mixture.vocabulary_lines(text, ["en", "de"], 0.3, 1000)
    vocabularies.train(lines, tiny_runs.TINY["vocab_size"], pieces)
    given = tiny_runs.TINY | {
        "data_dir": text,
        "vocabulary": pieces,
        "prepared_dir": tmp_path / "prepared",
        "generators": "en de",
        "task_mix": "mrtd",
        "cluster": "generator:0",
        "eval_every": STEPS,
        "steps": STEPS,
        "checkpoint_every": SAVED,
        "log_every": STEPS,
    }

    def train(workdir, start=0):
        run = configured.run(config, **given, workdir=workdir, window=0)
        link = Discriminator(start)
        monkeypatch.setattr(
            connect, "dial", lambda *_, **__: contextlib.nullcontext(link)
        )
        before = {each: signal.getsignal(each) for each in HANDLED}
        try:
            assert generator.train(data.checked(run, only=0), 0) == 0
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        return link.sent

    return train


HANDLED = (signal.SIGINT, signal.SIGTERM)


def test_a_generator_goes_on_with_the_next_batch_and_waits_for_tokens(
    trained, tmp_path
):
    """After a restart it sends what it would have sent: its position came back."""
    sent = trained(tmp_path / "run")
    again = trained(tmp_path / "run", start=SAVED)
    assert [step for name, step, _ in again if name == "tokens"] == [3, 4]
    for key, arrays in again.items():
        jax.tree.map(np.testing.assert_array_equal, arrays, sent[key])
