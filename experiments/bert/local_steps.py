"""The flags of local steps, which are those of the library's settings."""

import dataclasses
import re
from collections.abc import Sequence

from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.parallel.local_steps import settings as settings_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.training import diloco

_LAYER = re.compile(r"(?:^|/)(?:layer|adapters?)_(\d+)(?:/|$)")
_FIRST = re.compile(r"(?:^|/)embeddings/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of local steps, which all clusters share.

    Defaults of the outer step are Streaming DiLoCo's (arXiv 2501.18512).
    """

    sync: str = fields.of_line(
        "streaming",
        "Exchange of the clusters: allreduce (one cluster, which adds up gradients"
        " every step), or streaming (local steps).",
        choices=["allreduce", "streaming"],
    )
    inner_steps: int = fields.of_line(
        100,
        "Steps of a cluster between two exchanges of a fragment, H. After the last of"
        " --steps all fragments have one more, which stays if --steps grows.",
        lower=1,
    )
    fragments: int = fields.of_line(
        1,
        "Parts of the parameters that are exchanged one after the other, P; divides"
        " the number of layers.",
        lower=1,
    )
    delay: int = fields.of_line(
        0,
        "Steps from a fragment's sending until it is applied, τ: time for the line."
        " Below --inner_steps / --fragments.",
    )
    mixing: float = fields.for_experts(
        0.5,
        "Share of a cluster's own parameters when a fragment is applied, α; the rest"
        " is the anchor's.",
    )
    outer_learning_rate: float = fields.for_experts(
        0.7, "Learning rate of the outer step.", lower=1e-9
    )
    outer_momentum: float | None = fields.for_experts(
        None,
        "Nesterov's momentum of the outer step; 0.9 if not given, or 0 where"
        " --inner_steps is below 24.",
        upper=0.999,
    )
    delta_codec: str = fields.of_line(
        "e3m0(256)",
        "Codec of what crosses, the difference from the anchor.\n"
        "e3m0(256)|zstd(3): a codec, and the level of zstd.",
    )
    robust: bool = fields.for_experts(
        False,
        "Scales what a cluster sends down to the median norm of all before the mean: no"
        " cluster alone moves the others far.",
    )
    hub: str = fields.of_line(
        "",
        "Cluster over which all others exchange, such as 0; if empty, each has a"
        " connection to each.",
    )
    quorum: int = fields.of_line(
        0,
        "Clusters with which a round goes on without those that are late, --hub's"
        " included; 0 to wait for all.",
    )
    grace: float = fields.of_line(
        0.0, "Seconds that a round with --quorum clusters still waits for the others."
    )

    def rounds(self) -> settings_lib.Settings:
        """Returns the library's settings; of one cluster, which has no rounds, any."""
        if self.sync == "allreduce":
            return settings_lib.Settings(inner_steps=1)
        return settings_lib.Settings(
            inner_steps=self.inner_steps,
            fragments=fragment_of(self.fragments),
            delay=self.delay,
            codec=self.delta_codec,
            mixing=self.mixing,
            learning_rate=self.outer_learning_rate,
            momentum=self.outer_momentum,
            is_robust=self.robust,
            quorum=self.quorum,
            grace=self.grace,
        )

    def window(self) -> int:
        """Returns the steps that one cluster may be ahead of another."""
        return self.inner_steps + self.delay


def fragment_of(fragments: int) -> diloco.FragmentOf:
    """Returns the fragment of each parameter: layer i is in fragment i mod P.

    What comes before the layers (embeddings) is in the first fragment, what comes after
    (heads) in the last.

    >>> [fragment_of(2)(path) for path in ("encoder/layer_3/bias", "mlm_head/bias")]
    [1, 1]
    """

    def of(path: str) -> int:
        layer = _LAYER.search(path)
        if layer:
            return int(layer[1]) % fragments
        return 0 if _FIRST.search(path) else fragments - 1

    return of


def check(settings: Settings, clusters: Sequence[str]) -> None:
    """Raises errors.NebulaError at what cannot work, before anything starts."""
    sync = settings.sync
    if sync == "allreduce" and len(clusters) > 1:
        raise errors.SettingsError(
            f"--sync=allreduce is for one cluster, and there are {len(clusters)}: give"
            " --clusters=1, or --sync=streaming"
        )
    if sync != "allreduce" and len(clusters) == 1:
        raise errors.SettingsError(
            f"--sync={sync} is for several clusters: give --clusters=2 or more, or"
            " --sync=allreduce"
        )
    rounds = settings.rounds()
    try:
        rounds.compression  # noqa: B018  (it is read)
    except errors.SettingsError as error:
        rest = str(error).removeprefix("codec=")
        raise errors.SettingsError(f"--delta_codec={rest}") from None
    rounds.config(1 if sync == "allreduce" else settings.fragments)
    all_clusters.dialed("", clusters, settings.hub)  # there is such a hub
    rounds.check_quorum(clusters, settings.hub)
