"""Everything that crosses in a BERT run: a message a round, from each cluster to all.

delta p of k    a round of fragment p             cluster k -> all others, or the hub

With --quorum the hub also sends each of the others what it decides:

delta p of k    as far as it came in time         hub -> all but k
verdict         the clusters that a round has     hub -> all others
anchor p        the state of fragment p           hub -> those that have missed rounds
"""

from collections.abc import Sequence

from experiments.bert import config, copies, timing
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity
from nebula_jax.parallel.local_steps import exchange
from nebula_jax.parallel.local_steps import rounds as rounds_lib
from nebula_jax.parallel.local_steps.quorum import hub as hub_lib
from nebula_jax.parallel.local_steps.quorum import leaf as leaf_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints


def rounds(
    run: config.Run,
    copy: copies.Copy,
    others: all_clusters.Others,
    lines: list[all_clusters.AnyLink],
    work: activity.Work,
    timer: timing.Timer,
) -> rounds_lib.Rounds | None:
    """Opens a cluster's channels; None if there is one cluster.

    Args:
      run: of this process.
      copy: of the cluster.
      others: the other clusters.
      lines: links of this cluster so far; those of clusters that come anew are added.
      work: of this process.
      timer: of the cluster.
    """
    if copy.member is None:
        return None
    agreed, local = run.agreed, run.local
    names, own, zstd = config.names(agreed), local.cluster, agreed.compression().zstd
    if not agreed.quorum:
        ends = exchange.Exchange(
            *(names, own, others.links, copy.member.specs, copy.member.codec),
            *(zstd, agreed.hub),
        )
        return rounds_lib.LocalRounds([copy.member], ends)
    if own != agreed.hub:
        link = _of_one_process(others.links[agreed.hub])
        last = timer.most(agreed.steps)
        return leaf_lib.Leaf(copy.member, names, own, link, zstd, last)

    def newcomer() -> Link | None:
        found = others.newcomer()
        if found is None:
            return None
        lines.append(found)
        return _of_one_process(found)

    return hub_lib.Hub(
        *(copy.member, names, own),
        {name: _of_one_process(link) for name, link in others.links.items()},
        hub_lib.Rule(agreed.quorum, agreed.grace, local.reconnect_timeout),
        zstd=zstd,
        rejoined=newcomer,
        times=timer.latest,
        work=work,
        log=process.message,
    )


def _of_one_process(link: all_clusters.AnyLink) -> Link:
    assert isinstance(link, Link)  # else --quorum would have been refused
    return link


def begin(
    run: config.Run,
    others: all_clusters.Others,
    rounds: rounds_lib.Rounds | None,
    saved: Sequence[int],
) -> int:
    """Agrees with the others on where the run goes on, once all channels are open.

    With --quorum that is the hub's newest checkpoint. A cluster that does not have it
    gets the state of the run.

    Args:
      run: of this process.
      others: the other clusters.
      rounds: with them.
      saved: steps that this cluster has saved.

    Returns:
      The step whose checkpoint is to be restored; 0 for none. If it is below `step` of
      the rounds, the state of the run is to come.

    Raises:
      errors.NebulaError: as `all_clusters.agree_start` and `leaf_lib.Leaf.begin`.
    """
    every, window = run.agreed.checkpoint_every, run.agreed.window()
    timeout = run.local.connect_timeout
    if isinstance(rounds, hub_lib.Hub):
        start = max([0, *saved])
        if start == 0:  # else what the others have would be given up
            links = others.links.items()
            steps = {name: link.peer.checkpoints for name, link in links}
            checkpoints.newest_of_all(steps | {"the hub": ()}, every, window)
        rounds.begin(start)
        return start
    if isinstance(rounds, leaf_lib.Leaf):
        start = rounds.begin(timeout, saved)
        return max(step for step in (0, *saved) if step <= start)
    return all_clusters.agree_start(others, every, window, timeout)
