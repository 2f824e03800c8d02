"""The Hellos of an ABNet run: contents, and checks of the peer's."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import nebula_jax
from experiments import configuration
from experiments.abnet import config
from nebula_jax import errors, printable
from nebula_jax.communication import bridge
from nebula_jax.communication.wire import frames
from nebula_jax.models import transformer

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


def check_same_side(own: frames.Hello, peer: frames.Hello) -> None:
    """Checks that another cluster of this side has the same model and text.

    Args:
      own: of this cluster.
      peer: of the other one.

    Raises:
      bridge.Mismatch: if not.
    """
    here, there = own.details["fingerprints"], peer.details.get("fingerprints")
    if not isinstance(there, dict):
        there = {}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            shown = printable.line(there.get(name), FINGERPRINT_LENGTH)
            raise bridge.Mismatch(
                f"{peer.cluster} has {printable.line(name)}={shown}, {own.cluster} has"
                f" {here.get(name)}: those of one side need the same model and text"
            )


def peer_fingerprints(peer: frames.Hello) -> dict[str, str]:
    """Returns the fingerprints of the peer's model and text.

    Raises:
      errors.NebulaError: if its Hello has none.
    """
    found = peer.details.get("fingerprints")
    if not isinstance(found, dict) or len(found) > MOST_FINGERPRINTS:
        raise errors.NebulaError(
            f"{peer.cluster} sent no fingerprints of its model and text"
        )
    return of_peer(found)


def of_peer(fingerprints: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fingerprints of a peer under the names that a checkpoint has."""
    return {
        f"the peer's {printable.line(name)}": printable.line(value, FINGERPRINT_LENGTH)
        for name, value in fingerprints.items()
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
