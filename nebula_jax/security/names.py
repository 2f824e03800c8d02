"""Names of clusters: in messages, in paths and in certificates."""

import re
from collections.abc import Sequence

from nebula_jax import errors

MOST_CHARACTERS = 63  # of a label of a DNS name
_CLUSTER = re.compile(r"[a-z0-9]+([-:][a-z0-9]+)*")


def is_cluster(name: str) -> bool:
    """Returns True if a cluster may have this name."""
    return len(name) <= MOST_CHARACTERS and bool(_CLUSTER.fullmatch(name))


def label(cluster: str) -> str:
    """Returns the name of a cluster's certificate and of its folder.

    >>> label("generator:0")
    'generator-0'
    """
    return cluster.replace(":", "-")


def check(clusters: Sequence[str]) -> None:
    """Raises SettingsError if one is no cluster's name, or two are too alike."""
    owners: dict[str, str] = {}
    for cluster in clusters:
        if not is_cluster(cluster):
            raise errors.SettingsError(
                f"{cluster!r} is no cluster's name: those have up to {MOST_CHARACTERS}"
                " small letters, digits, - and :, as in generator:0"
            )
        other = owners.setdefault(label(cluster), cluster)
        if other != cluster or clusters.count(cluster) > 1:
            raise errors.SettingsError(
                f"{other} and {cluster} would have the same certificate"
            )
