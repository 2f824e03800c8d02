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
    config: Any,
    data: Any,
    train_whole: Callable[..., int],
    without_text: int = 0,
) -> here.Prepared:
    """Prepares a run, checked against its text; see `here.Experiment`.

    Modules of the experiment are `config`, with `settings`, and `data`, with
    `shared_vocabulary` and `text_of`. `train_whole`, given the run, trains all parts in
    this process; `without_text` is the number of clusters that read none.
    """
    run = run.with_local(vocabulary=str(data.shared_vocabulary(run)))
    vocabulary = vocabularies.given(run.local)
    wanted = config.settings(run, vocabulary)
    for name in names:
        checkpoints.check_same_run(run.local.workdir, name, wanted)
    if not run.local.data:  # the organization that serves text has prepared it
        with process.timed("preparing the text"):
            for index in range(len(names) - without_text):
                data.text_of(run, index, vocabulary)
    return here.Prepared(
        run,
        functools.partial(train_whole, run),
        functools.partial(here.arguments, run),
        {"vocab_size": vocabulary.size},
    )
