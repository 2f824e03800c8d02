"""What a side has before its loop begins, and what it shows the other one."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import nebula_jax
from experiments import configuration
from experiments.abnet import channels, config, control, data, models
from nebula_jax import errors, printable
from nebula_jax.communication import bridge, ranks
from nebula_jax.communication.wire import frames
from nebula_jax.data import example_alignment
from nebula_jax.models import transformer
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import cut
from nebula_jax.training import state as train_state

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


class Side(NamedTuple):
    """One side of a run, before it has met the other one."""

    plm: models.Plm
    text: data.Text
    saved: checkpoints.Checkpoints
    hello: frames.Hello
    check: bridge.Check
    """Checks the other side's Hello."""


def opened(
    run: config.Run,
    context: context_lib.Context,
    plm: models.Plm,
    text: data.Text,
    fingerprints: Mapping[str, str],
) -> Side:
    """Opens a side's checkpoints, and makes its Hello.

    Args:
      run: of this process.
      context: of its loop.
      plm: the side's pretrained model.
      text: the side's text.
      fingerprints: of both, which must be the same when the run resumes.

    Raises:
      checkpoint.CheckpointError: if the folder holds another run.
    """
    settings = configuration.settings(run.agreed)
    saved = context.open_checkpoints(settings, fingerprints)
    if ranks.is_root():  # only now: it is this run that the folder holds
        configuration.write_run_flags(context.folder, run)
    examples = example_alignment.fingerprint(text.ids, data.id_key(run))
    greeting = hello(run, saved.steps, plm.model.config, examples, fingerprints)
    check = functools.partial(data.check_same_examples, run, text)
    return Side(plm, text, saved, greeting, check)


def hello(
    run: config.Run,
    checkpoints: Sequence[int],
    model: transformer.Config,
    examples: Mapping[str, Any],
    fingerprints: Mapping[str, str],
) -> frames.Hello:
    """Returns this cluster's Hello.

    Args:
      run: of this process.
      checkpoints: steps that it could go on from.
      model: shape of its pretrained model, which the other side's adapters need.
      examples: fingerprint of its examples' ids (`example_alignment.fingerprint`).
      fingerprints: of its model and text, which must be the same when a run goes on.
    """
    return frames.Hello(
        run.local.cluster,
        nebula_jax.__version__,
        configuration.settings(run.agreed),
        tuple(checkpoints),
        {
            "model": dataclasses.asdict(model),
            "examples": dict(examples),
            "fingerprints": dict(fingerprints),
        },
    )


def peer_fingerprints(peer: frames.Hello) -> dict[str, str]:
    """Returns the fingerprints of the peer's model and text, as a checkpoint has them.

    Raises:
      errors.NebulaError: if its Hello has none.
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
    """Returns the shape of the peer's pretrained model.

    Raises:
      errors.NebulaError: if its Hello has none that could be.
    """
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
    choice: control.Control
    ends: channels.Ends
    batch: Any
    """Its batches, from `batches`."""
    state: train_state.TrainState
    codecs: list[cut.States]
    """States of the codecs, for each length bucket."""


def described(
    link: all_clusters.AnyLink, text: data.Text, state: train_state.TrainState
) -> dict[str, Any]:
    """Returns what both sides' summaries have.

    Args:
      link: to the other side.
      text: of this side.
      state: after the last step.
    """
    return {
        "ledger": link.ledger,
        "text": data.describe(text),
        "trained_parameters": models.trained_parameters(state),
    }
