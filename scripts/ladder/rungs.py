"""The rungs of the ladder: one step of BERT's pre-training, each with one flag more.

Every rung is `pretrain_bert`'s own step, compiled. Which attention goes on after its
own rung is decided on the machine (`timings`).

L length, N micro-batches.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.bert import config, copies, models
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.parallel import mesh as mesh_lib
from scripts.ladder import programs

START: Mapping[str, Any] = {
    **{"dtype": "float32", "logits": "all", "attention": "einsum"},
    **{"layout": "padded", "micro_batches": 1, "all_reduce": "each"},
}
"""Flags of the first rung."""


class Rung(NamedTuple):
    """A rung: its name, and the flags by which it differs from the one before."""

    name: str
    flags: Mapping[str, Any]
    devices: int = 1


PLAIN = Rung("logits where masked", {"logits": "masked"})
FUSED = Rung("fused attention", {"attention": "fused"})
FIRST = (
    Rung("float32, logits everywhere, padded rows", {}),
    Rung("bfloat16 operands, float32 sums", {"dtype": "bfloat16"}),
    PLAIN,
    FUSED,
)
"""The rungs until it is decided which attention goes on."""


def last(attention: str, micro_batches: int, devices: int) -> list[Rung]:
    """Returns the rungs after that.

    Args:
      attention: that goes on.
      micro_batches: N.
      devices: among which a batch is split; with one there is nothing to add up.
    """
    found = [
        Rung("joined rows", {"attention": attention, "layout": "joined"}),
        Rung("accumulation", {"micro_batches": micro_batches}, devices),
    ]
    if devices > 1:
        found += [
            Rung("one all-reduce a batch", {"all_reduce": "once"}, devices),
            Rung("all-reduce overlapped", {"all_reduce": "overlapped"}, devices),
        ]
    return found


class Compiled(NamedTuple):
    """A rung's program."""

    rung: Rung
    flags: Mapping[str, Any]
    """All of its flags."""
    copy: copies.Copy
    program: Callable[..., Any]
    """(state, frozen, *inputs) -> (state, metrics)."""
    sums: programs.AllReduces

    @property
    def positions(self) -> int:
        """The positions of a batch, padding included."""
        replicas = mesh_lib.replicas(self.copy.mesh)
        rows = self.copy.config.rows(self.copy.rows, replicas)
        return rows * self.copy.config.encoder.max_length

    def more_than(self, below: "Compiled") -> dict[str, Any]:
        """Returns the flags of this one that the one below has not."""
        found = {
            name: value
            for name, value in self.flags.items()
            if below.flags[name] != value
        }
        if self.rung.devices != below.rung.devices:
            found["devices_per_cluster"] = self.rung.devices
        return found


def compiled(
    run: config.Run,
    vocabulary: vocabularies.Vocabulary,
    rung: Rung,
    flags: Mapping[str, Any],
    joined_share: float,
) -> Compiled:
    """Compiles a rung's step.

    Args:
      run: with one cluster.
      vocabulary: of the run.
      rung: to compile.
      flags: those of all rungs up to it.
      joined_share: of `bert.Config`.
    """
    run = run.with_agreed(**flags).with_local(devices_per_cluster=rung.devices)
    made = models.load(run, vocabulary)
    shape = dataclasses.replace(made.config, joined_share=joined_share)
    copy = copies.plan(run, made._replace(config=shape), 0)
    ids = np.zeros((copy.rows, run.agreed.max_length), np.int32)
    shapes_of_state = copy.fresh.shapes["state"]
    step: Any = copy.step  # jitted
    inputs = copy.batch(ids, 0, 0.0).inputs
    program = step.lower(shapes_of_state, copy.frozen, *inputs).compile()
    sums = programs.all_reduces(program.as_text())
    return Compiled(rung, flags, copy, program, sums)
