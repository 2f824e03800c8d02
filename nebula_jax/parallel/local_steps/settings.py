"""The settings of local steps on any model, and one of R clusters' share of a batch."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.codecs import parser
from nebula_jax.training import diloco, partition


class Share(NamedTuple):
    """The part of a batch of all clusters that is one cluster's."""

    number: int = 0  # the place of the cluster among all, from 0
    parts: tuple[int, ...] = (1,)  # the sizes of the R clusters' parts

    def rows(self, batch_size: int) -> slice:
        """Returns which rows of a batch of all clusters are this one's.

        Raises errors.SettingsError if they cannot be split so.

        >>> Share(1, (1, 2, 1)).rows(8)
        slice(2, 6, None)
        """
        total = sum(self.parts)
        if batch_size % total:
            raise errors.SettingsError(
                f"batch_size={batch_size}: does not split"
                f" {':'.join(map(str, self.parts))} among the clusters; a multiple of"
                f" {total} does"
            )
        each = batch_size // total
        before = each * sum(self.parts[: self.number])
        return slice(before, before + each * self.parts[self.number])


ALONE = Share()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(diloco.OuterSettings):
    """The settings of local steps on a model of any kind; all clusters have the same.

    With inner_steps=1, learning_rate=1, momentum=0 and SGD in the clusters they are an
    all-reduce of gradients. SparseLoCo sends the largest values only: its codec is
    `error_feedback(sparse_loco(64, 4096), 0.95)`, with learning_rate=1 and momentum=0.
    """

    fragments: int | diloco.FragmentOf = 1
    """Parts that are sent one after the other: their number, for parts of about the
    same size; or a function from a parameter's path, as in `layers/0/kernel`, to the
    number or the name of its part."""
    codec: str | codec_lib.Codec = "e3m0(256)"
    """Of what crosses: a codec, or its expression; Streaming DiLoCo's 4-bit floats."""
    is_trained: partition.IsTrained = partition.train_all
    """True for the path of a parameter that trains; others do not cross. For adapters
    alone, `lambda path: "lora" in path`."""
    mixing: float | None = None
    """Share of a cluster's own parameters when a fragment is applied; None for 0.5 with
    a delay, else 0: all clusters then go on from the same ones."""
    shares: tuple[int, ...] = ()
    """R, the sizes of the clusters' parts of a batch beside each other, such as (1, 2);
    equal if empty. What the clusters send has these weights."""
    quorum: int = 0
    """Clusters with which a round goes on without those that are late, the hub
    included; 0 to wait for all."""
    grace: float = 0.0
    """Seconds that a round with a quorum still waits for the others."""

    def config(self, fragments: int) -> diloco.Config:
        """Returns the rounds' settings; raises errors.SettingsError, naming a field."""
        mixing = self.mixing
        if mixing is None:
            mixing = 0.5 if self.delay else 0.0
        names = [each.name for each in dataclasses.fields(diloco.OuterSettings)]
        same = {name: getattr(self, name) for name in names}
        return diloco.Config(fragments=fragments, mixing=mixing, **same)

    @functools.cached_property  # one for all replicas of a process
    def compression(self) -> codec_lib.Codec:
        """The codec of what crosses.

        Raises errors.SettingsError if it cannot be read, or is a choice among codecs.
        """
        found = parser.given("codec", self.codec)
        if not isinstance(found, codec_lib.Codec):
            raise errors.SettingsError(
                f"codec={found.name}: chooses among codecs, but all that crosses has"
                " one form; such as e3m0(256)"
            )
        return found

    def check_quorum(self, clusters: Sequence[str], hub: str) -> None:
        """Raises errors.SettingsError unless quorum and grace fit the clusters."""
        if self.quorum and not (hub and self.quorum <= len(clusters)):
            raise errors.SettingsError(
                f"quorum={self.quorum}: needs a hub, the cluster that goes on without"
                f" those that are late, and at most {len(clusters)} clusters"
            )
        if self.grace and not self.quorum:
            raise errors.SettingsError(
                f"grace={self.grace}: is for rounds with a quorum; without it all wait"
            )

    def share(self, number: int, count: int) -> Share:
        """Returns share `number`; raises errors.SettingsError unless `count` exist."""
        shares = tuple(self.shares) or (1,) * count
        if len(shares) != count or min(shares) < 1:
            raise errors.SettingsError(
                f"shares={shares}: expected {count} numbers above 0, one a cluster"
            )
        return Share(number, shares)
