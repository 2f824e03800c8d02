"""The meeting of an ABNet run's clusters: of a pair, and of several.

Of one pair the target listens, and the source dials it. With several a source also
meets the other sources, and a target the other targets: of two the first listens. So a
process has one listening port at most.

All go on after the newest step that all have. A source sends its steps to its target,
and that sends those that both have to `target:0`: so it dials others only once its
source has come. The step that `target:0` finds comes back the same way.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from experiments.abnet import config, pairs
from nebula_jax import errors
from nebula_jax.communication import ranks
from nebula_jax.communication.wire import activity, frames
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters, routes
from nebula_jax.runtime.records import checkpoints


class Met(NamedTuple):
    """The clusters that this one has met."""

    link: all_clusters.AnyLink
    """To the other half of the pair."""
    side: dict[str, all_clusters.AnyLink]
    """To the other clusters of this side, by their names; of one pair there are none.
    """
    start: Callable[[], int]
    """Returns the step that all go on after, once all channels are open."""

    @property
    def links(self) -> list[all_clusters.AnyLink]:
        """The links to all."""
        return [self.link, *self.side.values()]

    def described(self, rounds: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a summary has of the rounds; {} if there are none.

        Args:
          rounds: figures of this cluster's.
        """
        if not rounds:
            return {}
        ledgers = {name: link.ledger for name, link in self.side.items()}
        return {"rounds": dict(rounds), "side_ledgers": ledgers}


def met_by(agreed: config.Agreed, cluster: str) -> list[str]:
    """Returns a cluster's name and those that it meets, in the order of all.

    Args:
      agreed: settings of the run.
      cluster: its name.
    """
    everybody = pairs.clusters(agreed)
    return [
        name for name in everybody if name == cluster or pairs.are_joined(name, cluster)
    ]


def dials(agreed: config.Agreed) -> dict[str, list[str]]:
    """Returns for each cluster those that it dials, in order, for a launcher."""
    return {
        name: all_clusters.dialed(name, met_by(agreed, name))
        for name in pairs.clusters(agreed)
    }


def check_place(run: config.Run, settings: connect.Settings) -> None:
    """Checks that a cluster has what it needs to meet the others.

    Args:
      run: of this process.
      settings: by which it meets them.

    Raises:
      errors.NebulaError: before anything has started.
    """
    agreed, cluster = run.agreed, run.local.cluster
    if agreed.replicas == 1:
        connect.check_role(settings, cluster, "target", "source")
        return
    everybody = pairs.clusters(agreed)
    met = met_by(agreed, cluster) if cluster in everybody else everybody
    all_clusters.check_place(settings, cluster, met)


@contextlib.contextmanager
def meet(
    run: config.Run,
    greeting: frames.Hello,
    check_pair: routes.Check,
    work: activity.Work,
) -> Iterator[Met]:
    """Waits until this cluster has links to all that it meets.

    Args:
      run: of this process.
      greeting: Hello of this cluster.
      check_pair: of the Hello of the other half of the pair.
      work: what this process does.

    Yields:
      The links, which close with the block.

    Raises:
      errors.NebulaError: see `connect.dial`, `connect.listen` and `all_clusters.meet`.
    """
    agreed, local = run.agreed, run.local
    settings, other = local.connection(), pairs.other_half(greeting.cluster)
    if agreed.replicas > 1:
        raise errors.SettingsError("--replicas above 1 is withdrawn")
    elif pairs.role_of(local.cluster) == "source":
        with connect.dial(
            settings, greeting, peer=other, check=check_pair, work=work
        ) as link:
            yield Met(
                link,
                {},
                lambda: ranks.agree(link.wait_for_welcome(local.connect_timeout)),
            )
    else:
        with connect.listen(
            settings, greeting, [other], check=check_pair, work=work
        ) as [link]:
            yield Met(link, {}, lambda: _begun(run, greeting, link))


def _begun(run: config.Run, greeting: frames.Hello, link: all_clusters.AnyLink) -> int:
    """Lets the source of one pair go on; returns the step."""
    start = _newest(run.agreed, greeting, link.peer)
    link.welcome(start)
    return start


def _newest(agreed: config.Agreed, *of: frames.Hello) -> int:
    """Returns the newest step that all of these have saved."""
    steps = {each.cluster: each.checkpoints for each in of}
    return checkpoints.newest_of_all(steps, agreed.checkpoint_every, agreed.window())
