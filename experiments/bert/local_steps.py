"""The settings of local steps: their flags, and which of them go together."""

import dataclasses
from collections.abc import Sequence

from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.training import diloco

ONLY_OF = {
    "mixing": "streaming",
    "outer_learning_rate": "streaming",
    "outer_momentum": "streaming",
    "unsent": "sparse",
}
"""Setting that one --sync alone has -> this one."""
CODECS = {
    "streaming": "e3m0(256)",
    "sparse": "error_feedback(sparse_loco(64, 4096), 0.95)",
}
"""--sync -> the codec of what crosses, if none is given."""
UNSENT_CODEC = "sparse_loco(64, 4096)"
"""The codec of what crosses with --unsent=parameters, if none is given."""


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
        100, "Steps of a cluster between two exchanges of a fragment, H.", lower=1
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
        " is the anchor's. With --sync=streaming.",
    )
    outer_learning_rate: float = fields.for_experts(
        0.7, "Learning rate of the outer step, with --sync=streaming."
    )
    outer_momentum: float = fields.for_experts(
        -1.0,
        "Nesterov's momentum of the outer step, with --sync=streaming; -1 for 0.9"
        " where --inner_steps is 24 or more, else 0.",
        lower=-1.0,
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

    def codec_text(self) -> str:
        """Returns the codec of what crosses, as a flag; empty where nothing does."""
        default = CODECS.get(self.sync, "")
        if self.sync == "sparse" and self.unsent == "parameters":
            default = UNSENT_CODEC
        return self.delta_codec or default

    def local_steps(self) -> diloco.Config:
        """Returns the settings of local steps.

        SparseLoCo has no outer optimizer: what is sent is taken off as it is. And it
        begins each round at the anchor, since what was not sent is in the codec's
        residual already: α would count it twice. With --unsent=parameters there is no
        residual, and a cluster's parameters are ahead of the anchor by what it has not
        sent.

        Raises:
          errors.SettingsError: at what cannot be; begins with a field's name.
        """
        is_sparse = self.sync == "sparse"
        momentum = None if self.outer_momentum == -1 else self.outer_momentum
        return diloco.Config(
            self.inner_steps,
            self.fragments,
            self.delay,
            mixing=0.0 if is_sparse else self.mixing,
            learning_rate=1.0 if is_sparse else self.outer_learning_rate,
            momentum=0.0 if is_sparse else momentum,
            keeps_unsent=is_sparse and self.unsent == "parameters",
        )

    def window(self) -> int:
        """Returns the steps that one cluster may be ahead of another."""
        return self.inner_steps + self.delay

    def codec(self) -> codec_lib.Codec:
        """Returns the codec of what crosses.

        Raises:
          errors.NebulaError: if it cannot be read, or is a choice among codecs.
        """
        found = codecs.from_string(self.codec_text())
        if isinstance(found, selector.Selector):
            raise errors.SettingsError(
                f"--delta_codec={self.codec_text()}: chooses among codecs, but all that"
                " crosses has one form; such as e3m0(256)"
            )
        return found


OWN_FLAGS = {
    "learning_rate": "outer_learning_rate",
    "momentum": "outer_momentum",
}
"""Field of `diloco.Config` -> its flag, where that has another name."""


def check(settings: Settings, clusters: Sequence[str], has_processes: bool) -> None:
    """Checks the settings, before anything starts.

    Args:
      settings: of the run.
      clusters: their names.
      has_processes: True if a cluster has several processes.

    Raises:
      errors.NebulaError: at what cannot work, with what would do.
    """
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
    _check_used(settings)
    if sync == "allreduce":
        return
    try:
        settings.local_steps()
    except errors.SettingsError as error:
        field, _, rest = str(error).partition(" ")
        raise errors.SettingsError(f"--{OWN_FLAGS.get(field, field)} {rest}") from None
    # A name has all parts of a codec: error feedback may follow others, or be inside.
    is_kept = "error_feedback(" in settings.codec().name
    if settings.unsent == "parameters" and is_kept:
        raise errors.SettingsError(
            f"--delta_codec={settings.codec_text()} and --unsent=parameters both keep"
            " what was not sent; give the codec without error_feedback"
        )
    _check_hub(settings, clusters)
    # Processes would have to agree on what has arrived, time and again.
    if settings.quorum and has_processes:
        raise errors.SettingsError(
            f"--quorum={settings.quorum} is for clusters of one process each"
        )


def _check_used(settings: Settings) -> None:
    """Raises errors.SettingsError if a flag is given that is for the other --sync.

    --sync=allreduce uses none of them and refuses none, so that one flagfile serves
    both.
    """
    for field in dataclasses.fields(Settings):
        of, value = ONLY_OF.get(field.name), getattr(settings, field.name)
        is_given = value != field.metadata["setting"].default
        if of and is_given and settings.sync not in (of, "allreduce"):
            raise errors.SettingsError(
                f"--{field.name}={value} is for --sync={of}, not for"
                f" --sync={settings.sync}"
            )


def _check_hub(settings: Settings, clusters: Sequence[str]) -> None:
    """Raises errors.SettingsError unless hub, quorum and grace go together."""
    hub, quorum, grace = settings.hub, settings.quorum, settings.grace
    if hub and hub not in clusters:
        raise errors.SettingsError(
            f"--hub={hub}: there is no such cluster; expected one of"
            f" {', '.join(clusters)}"
        )
    if quorum and not hub:
        raise errors.SettingsError(
            f"--quorum={quorum} needs --hub, the cluster that goes on without those"
            " that are late"
        )
    if quorum > len(clusters):
        raise errors.SettingsError(
            f"--quorum={quorum}: there are {len(clusters)} clusters, of which from 1 to"
            f" {len(clusters)} can be waited for"
        )
    if grace and not quorum:
        raise errors.SettingsError(
            f"--grace={grace} is for rounds of --quorum clusters; without it all wait"
        )
