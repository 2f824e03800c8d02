"""What every pre-training prepares before its clusters start: vocabulary and text."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from experiments import configuration, here
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints


def prepare(
    run: configuration.Run,
    names: Sequence[str],
    *,
    settings: Callable[..., dict[str, Any]],
    shared_vocabulary: Callable[..., Any],
    text_of: Callable[..., Any],
    train_whole: Callable[..., int],
    without_text: int = 0,
) -> here.Prepared:
    """Prepares a run; see `here.Experiment`.

    Args:
      run: of this process, checked against its text.
      settings: (run, vocabulary) -> what all clusters must share.
      shared_vocabulary: run -> the vocabulary's path; made of the run's text if none is
        given.
      text_of: (run, index, vocabulary) -> the text of one reader, prepared.
      train_whole: run -> the exit status of all parts trained in this process.
      without_text: clusters that read none.
    """
    run = run.with_local(vocabulary=str(shared_vocabulary(run)))
    vocabulary = vocabularies.given(run.local)
    wanted = settings(run, vocabulary)
    for name in names:
        checkpoints.check_same_run(run.local.workdir, name, wanted)
    if not run.local.data:  # the organization that serves text has prepared it
        with process.timed("preparing the text"):
            for index in range(len(names) - without_text):
                text_of(run, index, vocabulary)
    return here.Prepared(
        run,
        functools.partial(train_whole, run),
        functools.partial(here.arguments, run),
        {"vocab_size": vocabulary.size},
    )
