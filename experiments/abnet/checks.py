"""Checks of the settings of an ABNet run, before anything starts."""

from experiments.abnet import config, crossing
from experiments.local_steps import config as local_steps_config
from nebula_jax import errors
from nebula_jax.communication import selector
from nebula_jax.communication.wire import frames
from nebula_jax.evaluation import mask_predict
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices

MOST_BUCKETS = 250  # a bucket's number crosses as a uint8
NO_HUB = ("hub", "quorum", "grace")
"""Flags of local steps that pairs have no use for."""


def check(run: config.Run) -> None:
    """Raises errors.NebulaError at what cannot work, before anything starts."""
    agreed, local = run.agreed, run.local
    config.languages(agreed.pair)
    _check_buckets(agreed.length_buckets)
    check_beams(agreed)
    _check_replicas(agreed)
    _check_bottleneck(agreed)
    _check_auto(run)
    _check_staleness(run)
    _check_options(agreed)
    devices.check(local.layout(), agreed.batch_size, agreed.micro_batches)
    if local.data:
        if local.cluster.partition(":")[0] != "source" or local.side_dir:
            raise errors.SettingsError(
                f"--data={local.data} is for --cluster=source, in place of --side_dir"
            )
        if agreed.replicas > 1:  # they end later than a text may that is withdrawn
            raise errors.SettingsError(
                f"--data={local.data} is for one pair, not --replicas={agreed.replicas}"
            )
    elif local.cluster not in ("all", "whole"):
        config.side_dir(local)
        _report_unused(local)
    elif local.side_dir:
        raise errors.SettingsError(
            f"--side_dir is for one cluster; --cluster={local.cluster} makes both sides"
            " of --data_dir"
        )


def _report_unused(local: config.Local) -> None:
    """Names the flags that choose pairs where the side is there already."""
    chosen = {
        "corpora": local.corpora,
        "max_pairs": local.max_pairs is not None,
        "max_words": local.max_words is not None,
        "held_out_pairs": local.held_out_pairs,
    }
    unused = ", ".join(f"--{name}" for name, is_given in chosen.items() if is_given)
    if unused:
        process.message(
            f"--side_dir={local.side_dir} is taken as it is: {unused} chose its pairs"
            " if scripts.split_parallel was given the same, and else count for nothing"
        )


def check_beams(agreed: config.Agreed) -> None:
    """Raises errors.SettingsError if there are fewer lengths than candidates."""
    longest = agreed.length_buckets[-1]
    lengths = longest + 1 - mask_predict.SHORTEST
    if agreed.objective == "cmlm" and agreed.beams > lengths:
        raise errors.SettingsError(
            f"--beams={agreed.beams}: with --objective=cmlm these are lengths of a"
            f" translation, of which --length_buckets={longest} leaves {lengths}"
        )


def _check_replicas(agreed: config.Agreed) -> None:
    """Raises errors.NebulaError if the flags of local steps do not go together."""
    for name in NO_HUB:
        if value := getattr(agreed, name):
            raise errors.SettingsError(
                f"--{name}={value} is not for train_abnet: the clusters of a side all"
                " meet each other, and wait for all"
            )
    if agreed.replicas == 1:
        return
    if agreed.sync == "allreduce":
        raise errors.SettingsError(
            f"--sync=allreduce is not for --replicas={agreed.replicas}: give"
            " --sync=streaming or --sync=sparse"
        )
    if agreed.delta_weights != "equal":
        raise errors.SettingsError(
            f"--delta_weights={agreed.delta_weights} is not for train_abnet: the loss"
            " of each pair is divided by the tokens of all, so its weight is in it"
        )
    local_steps_config.check(agreed, list(map(str, range(agreed.replicas))))


def _check_buckets(buckets: tuple[int, ...]) -> None:
    text = ",".join(map(str, buckets))
    if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 4:
        raise errors.SettingsError(
            f"--length_buckets={text}: must ascend, from 4 or more"
        )
    if len(buckets) > MOST_BUCKETS:
        raise errors.SettingsError(
            f"--length_buckets={text}: at most {MOST_BUCKETS} numbers"
        )


def _check_auto(run: config.Run) -> None:
    """Raises errors.SettingsError where codecs cannot be chosen by the run."""
    agreed = run.agreed
    if not crossing.is_auto(agreed):
        for name in ("forward_codec", "backward_codec"):
            if getattr(agreed, name) == crossing.AUTO:
                raise errors.SettingsError(
                    f"--{name}=auto: --forward_codec and --backward_codec are auto"
                    " together"
                )
    elif run.local.cluster == "whole" or agreed.replicas > 1:
        raise errors.SettingsError(
            "--forward_codec=auto is for one pair of clusters, with a line between"
            " them: not for --cluster=whole, nor for --replicas"
        )


def _check_options(agreed: config.Agreed) -> None:
    """Raises errors.NebulaError at a codec that cannot be read or has many shapes."""
    for name, compression in (
        ("forward_codec", crossing.forward(agreed)),
        ("backward_codec", crossing.backward(agreed)),
    ):
        count = len(selector.variants(compression.codec))
        if count > frames.MAX_OPTIONS:
            ranks = ",".join(map(str, agreed.bottleneck))
            raise errors.SettingsError(
                f"--{name}={getattr(agreed, name)} with --bottleneck={ranks} has"
                f" {count} shapes, of which at most {frames.MAX_OPTIONS} can be: give"
                " pack_tokens fewer capacities, or --bottleneck fewer ranks"
            )


def _check_staleness(run: config.Run) -> None:
    """Raises errors.SettingsError where gradients cannot be a step late."""
    agreed, ahead = run.agreed, run.local.max_in_flight
    if agreed.staleness and ahead <= agreed.micro_batches:
        raise errors.SettingsError(
            f"--staleness={agreed.staleness} needs a --max_in_flight above"
            f" --micro_batches={agreed.micro_batches}, best twice as high, not {ahead}:"
            " micro-batches of two steps are under way at once"
        )
    if agreed.staleness and (crossing.is_auto(agreed) or agreed.replicas > 1):
        raise errors.SettingsError(
            f"--staleness={agreed.staleness} is for one pair of clusters with fixed"
            " codecs: not for auto codecs, nor for --replicas"
        )


def _check_bottleneck(agreed: config.Agreed) -> None:
    """Raises errors.SettingsError at ranks that do not descend."""
    ranks = agreed.bottleneck
    text = ",".join(map(str, ranks))
    if list(ranks) != sorted(set(ranks), reverse=True) or (ranks and ranks[-1] < 1):
        raise errors.SettingsError(
            f"--bottleneck={text}: must descend, down to 1 or more"
        )
    if ranks and agreed.replicas > 1:
        raise errors.SettingsError(
            f"--bottleneck={text} is for one pair, not --replicas={agreed.replicas}"
        )
