"""The flags of local steps: of the library's settings, with defaults by --sync."""

import dataclasses
import re
from collections.abc import Sequence

from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.parallel.local_steps import settings as settings_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.training import diloco

SPARSE = "sparse_loco(64, 4096)"
DEFAULTS = {
    # 2501.18512: Nesterov, half of the own parameters kept, 4-bit floats.
    "streaming": {"codec": "e3m0(256)", "mixing": 0.5, "learning_rate": 0.7},
    # 2508.15706: no outer optimizer, what is sent is taken off as it is. A cluster
    # begins each round at the anchor, since what was not sent is in the codec's
    # residual already: mixing would count it twice.
    "sparse": {
        "codec": f"error_feedback({SPARSE}, 0.95)",
        "mixing": 0.0,
        "learning_rate": 1.0,
        "momentum": 0.0,
    },
}
"""--sync -> the library's settings, where no flag is given."""

_LAYER = re.compile(r"(?:^|/)(?:layer|adapters?)_(\d+)(?:/|$)")
_FIRST = re.compile(r"(?:^|/)embeddings/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of local steps, which all clusters share."""

    sync: str = fields.of_line(
        "streaming",
        "Exchange of the clusters: allreduce (one cluster, which adds up gradients"
        " every step), streaming (local steps, Nesterov's outer step), or sparse"
        " (local steps, the largest changes only).",
        choices=["allreduce", "streaming", "sparse"],
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
    mixing: float | None = fields.for_experts(
        None,
        "Share of a cluster's own parameters when a fragment is applied, α; the rest"
        " is the anchor's. 0.5 with --sync=streaming, 0 with sparse.",
    )
    outer_learning_rate: float | None = fields.for_experts(
        None,
        "Learning rate of the outer step: 0.7 with --sync=streaming, 1 with sparse.",
        lower=1e-9,
    )
    outer_momentum: float | None = fields.for_experts(
        None,
        "Nesterov's momentum of the outer step: with --sync=streaming 0.9 where"
        " --inner_steps is 24 or more, else 0.",
        upper=0.999,
    )
    delta_codec: str = fields.of_line(
        "",
        "Codec of what crosses, the difference from the anchor. If empty, e3m0(256)"
        " with --sync=streaming, and error_feedback(sparse_loco(64, 4096), 0.95)"
        " with --sync=sparse, or without its residual where --unsent=parameters.\n"
        "e3m0(256)|zstd(3): a codec, and the level of zstd.",
    )
    unsent: str = fields.for_experts(
        "residual",
        "Place of what a cluster has learned and not sent yet, with --sync=sparse:"
        " residual (of the codec: the cluster itself begins each round at the anchor),"
        " or parameters (the cluster goes on with it, and nothing is forgotten).",
        choices=["residual", "parameters"],
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
        keeps_unsent = self.unsent == "parameters"
        outer = {"momentum": None, **DEFAULTS[self.sync]}
        if keeps_unsent:  # the parameters are the residual
            outer["codec"] = SPARSE
        given = {
            "codec": self.delta_codec or None,
            "mixing": self.mixing,
            "learning_rate": self.outer_learning_rate,
            "momentum": self.outer_momentum,
        }
        outer |= {name: value for name, value in given.items() if value is not None}
        return settings_lib.Settings(
            inner_steps=self.inner_steps,
            fragments=fragment_of(self.fragments),
            delay=self.delay,
            keeps_unsent=keeps_unsent,
            is_robust=self.robust,
            quorum=self.quorum,
            grace=self.grace,
            **outer,
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
            " --clusters=1, or --sync=streaming or sparse"
        )
    if sync != "allreduce" and len(clusters) == 1:
        raise errors.SettingsError(
            f"--sync={sync} is for several clusters: give --clusters=2 or more, or"
            " --sync=allreduce"
        )
    if settings.unsent == "parameters" and sync == "streaming":
        raise errors.SettingsError("--unsent=parameters is for --sync=sparse")
    rounds = settings.rounds()
    try:
        codec = rounds.compression
    except errors.SettingsError as error:
        rest = str(error).removeprefix("codec=")
        raise errors.SettingsError(f"--delta_codec={rest}") from None
    # A name has all parts of a codec: error feedback may follow others, or be inside.
    if rounds.keeps_unsent and "error_feedback(" in codec.name:
        raise errors.SettingsError(
            f"--delta_codec={rounds.codec} and --unsent=parameters both keep what was"
            " not sent; give the codec without error_feedback"
        )
    rounds.config(1 if sync == "allreduce" else settings.fragments)
    all_clusters.dialed("", clusters, settings.hub)  # there is such a hub
    rounds.check_quorum(clusters, settings.hub)
