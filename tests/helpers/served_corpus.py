"""A corpus that a lab of `two_labs` serves from a thread, and the grants for it."""

import contextlib
import threading
import time

import tiny_runs

from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.life import process
from nebula_jax.runtime.served import data_service
from nebula_jax.security import accounts, grants

HANDLE = "corpus-tiny"
LENGTH = tiny_runs.TINY["max_length"]


def corpus(folder):
    """A text folder and its vocabulary."""
    text, pieces = tiny_runs.write_text(folder / "text"), folder / "v.model"
    lines = language_mixture.vocabulary_lines(text, list(tiny_runs.SENTENCES), 0.3, 999)
    vocabularies.train(lines, tiny_runs.TINY["vocab_size"], pieces)
    return text, vocabularies.load(pieces)


class Owner:
    """A lab that has a corpus, and decides who reads it."""

    def __init__(self, running, text, vocabulary, path):
        self.folder = running.folder
        self.people = accounts.Accounts(self.folder.path)
        self.grants = grants.Grants(self.people)
        provider = {
            "text_folder": str(text),
            "vocabulary": str(path),
            "max_length": LENGTH,
        }
        self.grants.register(HANDLE, provider, 150, vocabulary.digest, "Tiny.")

    def grant(self, subject, **bounds):
        given = grants.Grant(subject, HANDLE, **bounds or {"rows": 10**6})
        self.grants.give(given, time.time())
        return given

    def revoke(self, grant):
        self.grants.revoke(grant.subject, grant.handle)

    def used(self, grant):
        """Rows of all uses of a grant."""
        for each in self.grants.listing():
            if each[:2] == grant[:2]:
                return each.rows_used
        raise AssertionError(grant)

    @contextlib.contextmanager
    def serving(self, **options):
        """Serves the corpus from a thread; yields the lines that it logs."""
        lines = []
        options = {"log": lines.append, **options}
        service = data_service.DataService(self.folder, HANDLE, **options)
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        assert service.has_started.wait(20), lines
        try:
            yield lines
        finally:
            service.stop()
            thread.join(20)
            assert not thread.is_alive(), lines


def trained_by_two_grants(runs, owner, start, clusters, rows, steps):
    """Trains on a grant that is spent, then on one for the rest; checks both ends.

    `start` starts the `clusters` of the run `handle`, the second of which reads; it has
    to equal the run `plain`, of one process. `rows` are those of the first grant, of
    held-out text, and of a step. Returns the step at which the first grant ended the
    run, and what the reader said.
    """
    granted, held_out, batch = rows

    def train():
        ends = [runs.end_of(each, 120) for each in start()]
        print(*(output for _, output in ends))
        return ends

    given = owner.grant("owner@lab-t", rows=granted)
    for status, output in train():
        assert status == process.STOPPED_BY_PEER, output
    assert f"the grant of owner@lab-t for {HANDLE} has" in output
    said, spent = output, owner.used(given)
    folders = [runs.folder / "handle" / name / "checkpoints" for name in clusters]
    saved = [[path.name for path in each.iterdir()] for each in folders]
    assert saved[0] == saved[1]
    (name,) = saved[0]
    step, rest = int(name), held_out + (steps - int(name)) * batch
    given = owner.grant("owner@lab-t", rows=rest)
    for status, output in train():
        assert status == 0, output
        assert f"going on after step {step}" in output
    assert owner.used(given) == rest  # and not a row more
    runs.assert_same("handle", "plain", clusters, steps)
    return step, spent, said
