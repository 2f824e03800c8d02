"""Everything that crosses in a BERT run: a message a round, from each cluster to all.

delta p of k    a round of fragment p             cluster k -> all others, or the hub

With --quorum the hub also sends each of the others what it decides:

delta p of k    as far as it came in time         hub -> all but k
verdict         the clusters that a round has     hub -> all others
anchor p        the state of fragment p           hub -> those that have missed rounds
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from experiments.bert import config, models, timing
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.parallel.local_steps import rounds as rounds_lib
from nebula_jax.parallel.local_steps.quorum import hub as hub_lib
from nebula_jax.parallel.local_steps.quorum import leaf as leaf_lib
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import state as train_state

Rounds = rounds_lib.LocalRounds | hub_lib.Hub | leaf_lib.Leaf
"""A cluster's part in the rounds, of which the last two are those with a quorum."""


def connected(
    run: config.Run, context: context_lib.Context, hello: frames.Hello
) -> contextlib.AbstractContextManager[all_clusters.Peers]:
    """Connects to all other clusters; with --quorum they may rejoin during the run."""
    agreed = run.agreed
    may_return = agreed.clusters > 1 and agreed.quorum > 0
    return context.connect_all(
        hello, config.names(agreed), hub=agreed.hub, may_return=may_return
    )


def rounds(
    run: config.Run,
    member: member_lib.Member | None,
    peers: all_clusters.Peers,
    work: activity.Work,
    timer: timing.Timer,
) -> Rounds | None:
    """Opens a cluster's channels to its peers; None if it is the only cluster."""
    if member is None:
        return None
    agreed, own = run.agreed, run.local.cluster
    names = config.names(agreed)
    if not agreed.quorum:
        ends = rounds_lib.Exchange(
            names,
            own,
            peers.links,
            member.specs,
            member.codec,
            hub=agreed.hub,
        )
        return rounds_lib.LocalRounds([member], ends)
    if own != agreed.hub:
        link = _of_one_process(peers.links[agreed.hub])
        return leaf_lib.Leaf(member, names, own, link, timer.most)
    return hub_lib.Hub(
        member,
        names,
        own,
        {name: _of_one_process(link) for name, link in peers.links.items()},
        hub_lib.Rule(agreed.quorum, agreed.grace, run.local.reconnect_timeout),
        rejoined=lambda: _of_one_process(peers.rejoined()),
        times=timer.latest,
        work=work,
        log=process.message,
    )


def _of_one_process(link: Any) -> Any:
    assert link is None or isinstance(link, Link)  # else --quorum would be refused
    return link


def begin(
    run: config.Run,
    peers: all_clusters.Peers,
    rounds: Rounds | None,
    saved: Sequence[int],
) -> tuple[int, bool]:
    """Agrees with the others on where the run resumes, once all channels are open.

    With --quorum that is the hub's newest checkpoint. A cluster that does not have it
    gets the state of the run.

    Args:
      run, peers, rounds: of this process.
      saved: steps that this cluster has saved.

    Returns:
      The step whose checkpoint is to be restored, 0 for none; and True if the run is at
      a later step, whose state is to come.

    Raises:
      errors.NebulaError: as `all_clusters.agree_start` and `leaf.Leaf.begin`.
    """
    every, window = run.agreed.checkpoint_every, run.agreed.window()
    timeout = run.local.connect_timeout
    if isinstance(rounds, hub_lib.Hub):
        start = max([0, *saved])
        if start == 0:  # else what the others have would be given up
            links = peers.links.items()
            steps = {name: link.peer.checkpoints for name, link in links}
            checkpoints.newest_of_all(steps | {"the hub": ()}, every, window)
        rounds.begin(start)
        return start, False
    if isinstance(rounds, leaf_lib.Leaf):
        there = rounds.begin(timeout, saved)
        start = max(step for step in (0, *saved) if step <= there)
        return start, start < there
    return all_clusters.agree_start(peers, every, window, timeout), False


def exchange(
    rounds: Rounds | None,
    timer: timing.Timer,
    step: int,
    states: Sequence[train_state.TrainState],
    is_requested: bool,
) -> tuple[int, list[train_state.TrainState]]:
    """Sends and applies what is due after a step; after the last one, all fragments.

    Args:
      rounds: with the other clusters; None if there is one cluster.
      timer: of the run.
      step: just taken.
      states: of the replicas of this process.
      is_requested: True if the run shall end.

    Returns:
      The step at which the run is, with --quorum perhaps a later one; and the states.
    """
    if rounds is None:
        timer.agree(timer.alone(step, is_requested))
        return step, list(states)
    now = functools.partial(timer.now, is_requested)
    params, heads = rounds.after(step, [each.params for each in states], now)
    if rounds.step > step:
        states = [each.at_step(rounds.step) for each in states]
    # The heads of all clusters: each agrees on the time, and on a stop, as all others.
    timer.agree(heads)
    if timer.is_last(rounds.step):
        params = rounds.finish(rounds.step, params)
    return rounds.step, [
        dataclasses.replace(state, params=own)
        for state, own in zip(states, params, strict=True)
    ]


def described(
    run: config.Run,
    made: models.Models,
    rounds: Rounds | None,
    peers: all_clusters.Peers | None = None,
) -> dict[str, Any]:
    """Returns what a summary has of the model, the rounds and the other clusters."""
    found = {
        "models": models.describe(run, made),
        "rounds": rounds.described if rounds is not None else {},
    }
    if peers is not None:
        found["ledgers"] = {name: each.ledger for name, each in peers.links.items()}
    return found
