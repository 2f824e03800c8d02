"""The bytes that jobs and accounts have used, over restarts of the switch.

Counting is in memory, frame by frame. Now and then the switch writes what jobs have
used to a file, and charges accounts. One that has used up its quota is barred until it
has a larger one; one that could not be charged, until it is.
"""

import collections
import json
import pathlib
from collections.abc import Mapping

from nebula_jax import errors, files

FILE = "usage.json"


class QuotaSpent(errors.NebulaError):
    """An account whose quota is used up."""


class Usage:
    """The bytes that have been used."""

    def __init__(
        self, used: Mapping[str, int], barred: Mapping[str, str] | None = None
    ) -> None:
        """Goes on from earlier counts.

        Args:
          used: job -> bytes.
          barred: account -> the reason why nothing of it may pass; None for nobody.
        """
        self.used = collections.Counter(used)
        """Job -> bytes."""
        self.uncharged: collections.Counter[str] = collections.Counter()
        """Account -> bytes that its quota does not have yet."""
        self.barred = dict(barred or {})
        """Account -> the reason why nothing more of it may pass."""

    def check(self, account: str) -> None:
        """Raises QuotaSpent if nothing more of an account may pass."""
        if account in self.barred:
            raise QuotaSpent(self.barred[account])

    def reserve(self, job: str, account: str, count: int) -> None:
        """Counts bytes that are about to pass; raises QuotaSpent if they may not."""
        self.check(account)
        self.used[job] += count

    def release(self, job: str, count: int) -> None:
        """Takes back bytes that were reserved and did not come."""
        self.used[job] -= count

    def charge(self, account: str, count: int) -> None:
        """Has an account charged for bytes that pass: for those that came, alone."""
        self.uncharged[account] += count

    def take(self) -> dict[str, int]:
        """Returns account -> bytes to charge it with, which are not here any more."""
        taken = dict(self.uncharged)
        self.uncharged.clear()
        return taken

    def put_back(self, counts: Mapping[str, int]) -> None:
        """Takes back what could not be charged: account -> bytes."""
        self.uncharged.update(counts)


def read(folder: pathlib.Path) -> dict[str, int]:
    """Reads the counts of jobs; raises errors.SettingsError if they are damaged."""
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise errors.SettingsError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(
        type(count) is int and count >= 0 for count in found.values()
    ):
        raise errors.SettingsError(f"{path}: expected bytes by job")
    return found


def write(folder: pathlib.Path, used: Mapping[str, int]) -> None:
    """Writes the counts of jobs."""
    with files.writing(folder / FILE) as partial:
        partial.write_text(json.dumps(dict(sorted(used.items())), indent=1) + "\n")
