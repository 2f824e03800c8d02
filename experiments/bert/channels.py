"""Everything that crosses in a BERT run: a message a round, from each cluster to all.

delta p of k    a round of fragment p             cluster k -> all others, or the hub

With --quorum the hub also sends each of the others what it decides:

delta p of k    as far as it came in time         hub -> all but k
verdict         the clusters that a round has     hub -> all others
anchor p        the state of fragment p           hub -> those that have missed rounds
"""

import contextlib
from typing import Any

from experiments.bert import config, models
from nebula_jax.communication.wire import frames
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime import local_steps
from nebula_jax.runtime.connect import all_clusters


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
    context: context_lib.Context,
    peers: all_clusters.Peers,
    member: member_lib.Member | None,
) -> local_steps.Rounds:
    """Opens a cluster's channels to its peers; none if it is the only cluster."""
    agreed = run.agreed
    return local_steps.between(
        context,
        peers,
        member,
        quorum=agreed.quorum,
        grace=agreed.grace,
    )


def described(
    run: config.Run,
    made: models.Models,
    rounds: local_steps.Rounds,
    peers: all_clusters.Peers | None = None,
) -> dict[str, Any]:
    """Returns what a summary has of the model, the rounds and the other clusters."""
    found = {
        "models": models.describe(run, made),
        "rounds": rounds.described,
    }
    if peers is not None:
        found["ledgers"] = {name: each.ledger for name, each in peers.links.items()}
    return found
