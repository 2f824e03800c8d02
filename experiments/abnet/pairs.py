"""The clusters of an ABNet run: a source and a target, or several such pairs.

Of one pair they are `target` and `source`; of R pairs `target:0` ... `target:R-1` and
`source:0` ... `source:R-1`. The two of a pair meet, and all of one side.
"""

from typing import Literal, cast

from experiments import command_line
from experiments.abnet import config
from nebula_jax import errors

Role = Literal["source", "target"]
ROLES: tuple[Role, ...] = ("target", "source")  # the first one of a pair listens


def names(agreed: config.Agreed, role: Role) -> list[str]:
    """Returns the names of the clusters of one side, in their order.

    Args:
      agreed: settings of the run.
      role: of the side.
    """
    if agreed.replicas == 1:
        return [role]
    return [f"{role}:{replica}" for replica in range(agreed.replicas)]


def clusters(agreed: config.Agreed) -> list[str]:
    """Returns the names of all clusters, in their order: first the targets."""
    return [name for role in ROLES for name in names(agreed, role)]


def check_cluster(run: config.Run) -> None:
    """Raises errors.SettingsError unless --cluster names a part of the run."""
    cluster = run.local.cluster
    if cluster in ("all", "whole", *clusters(run.agreed)):
        return
    expected = "source or target"
    if run.agreed.replicas > 1:
        expected = ", ".join(clusters(run.agreed))
    raise errors.SettingsError(f"--cluster={cluster}: expected all, whole, {expected}")


def role_of(cluster: str) -> Role:
    """Returns `target` for `target:1`, and for `target`."""
    return cast(Role, cluster.partition(":")[0])


def replica_of(cluster: str) -> int:
    """Returns the number of a cluster's pair, from 0."""
    return command_line.whole_number(cluster.partition(":")[2]) or 0


def other_half(cluster: str) -> str:
    """Returns the name of the other cluster of a pair: `source:1` for `target:1`."""
    role, colon, number = cluster.partition(":")
    return f"{'source' if role == 'target' else 'target'}{colon}{number}"


def are_joined(one: str, other: str) -> bool:
    """Returns True for two clusters that meet."""
    return role_of(one) == role_of(other) or other == other_half(one)
