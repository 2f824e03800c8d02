"""The text of a BERT run: which cluster reads which rows of it.

With one group of languages all clusters read one stream, in batches of the rows of all,
and each takes its own rows of every batch: together they see what one cluster with the
whole batch sees. With a group for each, every cluster has a stream of its own.

L length.
"""

import pathlib
from typing import Any, NamedTuple

from experiments.bert import config
from experiments.pretraining import text
from experiments.pretraining import vocabulary as shared
from nebula_jax.communication.wire import activity
from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies


class Share(NamedTuple):
    """The rows of a cluster in the batches of its stream."""

    batch_size: int  # rows of a batch of the stream
    first_row: int  # the first one that is the cluster's
    rows: int  # how many are the cluster's
    number: int  # of its first row in the batch of all clusters; masks are drawn by it

    def within(self, here: slice = slice(None)) -> slice:
        """Returns where rows `here` of the cluster's own are in a batch of the stream.

        >>> Share(batch_size=24, first_row=8, rows=16, number=8).within(slice(8, 16))
        slice(16, 24, None)
        """
        start, stop, _ = here.indices(self.rows)
        return slice(self.first_row + start, self.first_row + stop)


def share_of(agreed: config.Agreed, index: int) -> Share:
    """Returns the rows of cluster `index`."""
    rows, number = agreed.batch_size, agreed.batch_size * index
    if len(agreed.groups()) > 1:
        return Share(rows, 0, rows, number)
    return Share(rows * agreed.clusters, number, rows, number)


def checked(run: config.Run, only: int | None = None) -> config.Run:
    """Returns the run with --languages written out, checked against its text.

    The text of cluster `only`, or if None of all, has to be here. Text that is served
    elsewhere is checked there, when the cluster comes.
    """
    groups = text.groups(run.agreed.languages, run.local)
    mixes = _mixes(run.agreed, groups)
    if not run.local.data:
        here = slice(None)
        if only is not None and len(groups) > 1:
            here = slice(only, only + 1)
        folder = text.folder(run.local)
        pairs = run.agreed.parallel_pairs
        language_mixture.check_text(folder, groups[here], mixes[here], pairs)
    return config.with_groups(run, groups)


def shared_vocabulary(run: config.Run) -> pathlib.Path:
    """Returns --vocabulary, or one made of all of the run's text (once per text)."""
    agreed, groups = run.agreed, run.agreed.groups()
    mixes = _mixes(agreed, groups)
    return shared.shared(run.local, groups, mixes, agreed.parallel_pairs)


def _mixes(
    agreed: config.Agreed, groups: list[list[str]]
) -> list[language_mixture.TaskWeights]:
    return language_mixture.parse_tasks(
        agreed.task_mix, groups, config.NAME, agreed.parallel_pairs
    )


def text_of(
    run: config.Run,
    index: int,
    vocabulary: vocabularies.Vocabulary,
    work: activity.Work | None = None,
) -> text.Text:
    """Prepares the text of cluster `index`; `work` is for --data.

    Its stream begins with `begin(position, share.batch_size, share.within(...))`.
    """
    agreed = run.agreed
    stream = index if len(agreed.groups()) > 1 else 0
    reader = text.Reader(
        cluster=config.name_of(index),
        languages=agreed.groups()[stream],
        mix=_mixes(agreed, agreed.groups())[stream],
        seed=text.seed_of(agreed.seed, stream),
        rows=agreed.batch_size,
        held_out_rows=agreed.eval_batch_size,
        # Alone it ends after the next step. With others the request goes with the next
        # fragment, and is received when that is applied.
        ahead=2 if agreed.sync == "allreduce" else agreed.window() + 2,
        most=agreed.steps,
    )
    return text.Text(agreed, run.local, reader, vocabulary, work)


def same_text(run: config.Run, of_cluster: text.Text) -> dict[str, Any]:
    """Returns what a Hello compares of a cluster's text: of one stream, all of it."""
    if len(run.agreed.groups()) > 1:
        return {}
    return {"text": of_cluster.key[:16]}
