"""A side before its loop begins: what it reads, and what it shows the other."""

import dataclasses
import functools
import operator
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.abnet import channels, config, data, models, target_model
from nebula_jax import errors, printable
from nebula_jax.communication import bridge, ranks
from nebula_jax.communication.wire import frames
from nebula_jax.communication.worker_link import AnyLink
from nebula_jax.data import example_alignment
from nebula_jax.models import abnet, bottleneck, transformer
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import cut
from nebula_jax.training import state as train_state

SENTENCES = 1024  # some ten thousand tokens, for products of a few hundred columns
MOST_FINGERPRINTS = 8
FINGERPRINT_LENGTH = 64  # characters that are kept of one
LARGEST_MODEL = {
    "vocab_size": 10_000_000,
    "layers": 1_000,
    "width": 1 << 15,
    "heads": 1 << 15,
    "feed_forward": 1 << 18,
    "max_length": 1 << 24,
}
"""Far beyond any encoder; a side's own layers are as wide as the peer's model."""


def read(
    run: config.Run, side: int, folder: pathlib.Path
) -> tuple[models.Plm, data.Text, dict[str, str]]:
    """Reads model and text of a side; PLM-T as `target_model.prepare` left it.

    Returns both, and their fingerprints, which must be the same when a run resumes.
    """
    is_source = side == models.SOURCE
    plm = models.load_source(run) if is_source else target_model.load(run)
    digest = plm.digest if is_source else target_model.fingerprint(run)
    text = data.read(run, folder, plm.tokenizer, is_translated=is_source)
    role = models.ROLES[side]
    digests = {f"{role}_model": digest, f"{role}_text": data.digest(run, text)}
    return plm, text, digests


class Side(NamedTuple):
    """One side of a run, before it has met the other one."""

    plm: models.Plm
    text: data.Text
    saved: checkpoints.Checkpoints
    hello: frames.Hello
    check: bridge.Check


def prepare(run: config.Run, context: context_lib.Context, side: int) -> Side:
    """Reads a side, opens its checkpoints, and makes its Hello.

    Raises checkpoint.CheckpointError if the folder holds another run.
    """
    folder = config.side_dir(run.local)
    if side == models.TARGET:
        if ranks.is_root():
            target_model.prepare(run, folder)
        ranks.agree(0)  # the cluster's other processes go on when it is there
    plm, text, fingerprints = read(run, side, folder)
    settings = config.settings(run)
    saved = run.open_checkpoints(context, settings, fingerprints)
    hello = run.hello(
        settings,
        saved.steps,
        # The other side's adapters need the shape.
        model=dataclasses.asdict(plm.model.config),
        examples=example_alignment.fingerprint(text.ids, data.id_key(run)),
        fingerprints=fingerprints,
    )
    check = functools.partial(data.check_same_examples, run, text)
    return Side(plm, text, saved, hello, check)


def peer_fingerprints(peer: frames.Hello) -> dict[str, str]:
    """Returns the fingerprints of the peer's model and text, as a checkpoint has them.

    Raises errors.NebulaError if its Hello has none.
    """
    found = peer.details.get("fingerprints")
    if not isinstance(found, dict) or len(found) > MOST_FINGERPRINTS:
        raise errors.NebulaError(
            f"{peer.cluster} sent no fingerprints of its model and text"
        )
    return {
        f"the peer's {printable.line(name)}": printable.line(value, FINGERPRINT_LENGTH)
        for name, value in found.items()
    }


def peer_model(peer: frames.Hello) -> transformer.Config:
    """Returns the peer model's shape; raises errors.NebulaError if it cannot be."""
    fields = peer.details.get("model")
    wanted = {each.name: each.type for each in dataclasses.fields(transformer.Config)}
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        raise errors.NebulaError(f"{peer.cluster} did not send the shape of its model")
    are_sizes = all(
        type(fields[name]) is int and 0 < fields[name] <= most
        for name, most in LARGEST_MODEL.items()
    )
    are_others = all(isinstance(fields[name], of) for name, of in wanted.items())
    if not (are_sizes and are_others and fields["width"] % fields["heads"] == 0):
        raise errors.NebulaError(f"{peer.cluster} has a model of impossible shape")
    return transformer.Config(**fields)


class Begun(NamedTuple):
    """A side as its loop begins."""

    half: models.Half
    ends: channels.Ends
    batch: Any  # its batches, from `data`
    state: train_state.TrainState
    codecs: list[cut.States]  # states of the codecs, for each length bucket


def begin(
    run: config.Run,
    context: context_lib.Context,
    own: Side,
    peers: all_clusters.Peers,
    side: int,
) -> Begun:
    """Opens all channels, restores the common step, exchanges what crosses once."""
    agreed, text, is_source = run.agreed, own.text, side == models.SOURCE
    [link] = peers.links.values()
    own.saved.add_fingerprints(peer_fingerprints(link.peer))
    other = peer_model(link.peer)
    width = own.plm.model.config.width if is_source else other.width
    # All that crosses, as one table.
    role = models.ROLES[side]
    ends = channels.open_ends(agreed, link, role, len(text.train), width)
    start = context.agree_start(peers)
    beginning = None
    if agreed.bottleneck and start == 0:
        found = best_directions(run, own.plm, text, other) if is_source else None
        beginning = _shared(ends, found)
    half = models.half(run, side, own.plm, other, beginning)
    fresh = channels.fresh(agreed, half, width)
    arrays, _ = own.saved.restore(start, fresh)
    batch = (_source_batches if is_source else _target_batches)(
        agreed, half, text, ends
    )
    context.begin(start, [link])
    return Begun(half, ends, batch, arrays["state"], arrays["codecs"])


def best_directions(
    run: config.Run, plm: models.Plm, text: data.Text, target: transformer.Config
) -> bottleneck.Start:
    """Finds the bottleneck that a run begins with: the best directions of its own text.

    They are those of hidden states of some sentences, as they are at step 0.
    """
    agreed = run.agreed
    translator = dataclasses.replace(
        models.model(agreed, plm.model.config, target), bottleneck=0
    )
    params = models.params_of(agreed, translator, plm.model, models.SOURCE)

    @jax.jit
    def moments(params: abnet.Params, ids: jax.Array, count: int) -> bottleneck.Moments:
        mask = ids != plm.tokenizer.special.pad
        hidden = abnet.encode(translator, params, ids, mask).hidden
        is_real = np.arange(len(ids)) < count  # others only fill the batch up
        return bottleneck.moments(hidden, mask & is_real[:, None])

    rows = text.train
    indices = np.linspace(0, len(rows) - 1, min(SENTENCES, len(rows))).astype(int)
    found = []
    with process.timed(
        f"finding the {agreed.bottleneck} best directions of hidden states"
    ):
        for batch in data.evaluation_batches(agreed, rows, indices):
            length = agreed.length_buckets[batch.bucket]
            index = indices[batch.indices]
            ids = rows.rows(index, length, plm.tokenizer.special.pad)
            found.append(jax.device_get(moments(params, ids, batch.count)))
    total = functools.reduce(
        lambda so_far, new: bottleneck.Moments(*map(operator.add, so_far, new)), found
    )
    return bottleneck.start(total, agreed.bottleneck)


def _shared(ends: channels.Ends, found: bottleneck.Start | None) -> bottleneck.Start:
    """Sends how the target begins, or receives it; the same in all processes."""
    if found is None:
        return bottleneck.Start(
            *map(np.asarray, ranks.everywhere(ends.bottleneck.recv(0)))
        )
    of_root = ranks.from_root(found, jax.eval_shape(lambda: found))
    same = bottleneck.Start(*map(np.asarray, ranks.everywhere(of_root)))
    ends.bottleneck.send(0, same)
    return same


def _source_batches(
    agreed: config.Agreed, half: models.Half, text: data.Text, ends: channels.Ends
) -> data.SourceBatches:
    """Sends the buckets of this side's rows, receives the lengths of the target's."""
    buckets = data.row_buckets(agreed, text)
    ends.buckets.send(0, buckets)
    lengths = np.zeros(len(buckets), np.int32)  # with the objective `ar`
    if ends.lengths is not None:
        lengths = np.asarray(ends.lengths.recv(0))
    order = data.schedule(agreed, buckets)
    return data.SourceBatches(agreed, half.mesh, text, order, lengths)


def _target_batches(
    agreed: config.Agreed, half: models.Half, text: data.Text, ends: channels.Ends
) -> data.TargetBatches:
    """Receives the buckets of the source's rows, sends the lengths of this side's."""
    buckets = np.asarray(ends.buckets.recv(0))
    if ends.lengths is not None:
        ends.lengths.send(0, text.train.lengths)
    order = data.schedule(agreed, buckets)
    return data.TargetBatches(agreed, half.mesh, text, order)


def described(
    link: AnyLink, text: data.Text, state: train_state.TrainState
) -> dict[str, Any]:
    """Returns what both sides' summaries have, given the last state."""
    return {
        "ledger": link.ledger,
        "text": data.describe(text),
        "trained_parameters": models.trained_parameters(state),
    }
