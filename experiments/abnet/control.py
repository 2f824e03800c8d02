"""Codecs that the run chooses by itself: `--forward_codec=auto --backward_codec=auto`.

Every --probe_every steps, and sooner while others are sought, the first micro-batch of
a step crosses twice more, by the codecs in use and by the least lossy ones, and each
side compares what it would train with. Then, in this order:

    probe.front  source -> target  [1] float32, cosine of the source's gradients
    probe.back   target -> source  [2] float32, that of the target's; its seconds
    tape         source -> target  [6] float32, the probe as both write it

The source measures how long the line takes, and so proposes; `parallel.codec_control`
decides, the same on both sides. What was measured is also in the file `tape.jsonl` of
the source's folder: a run that resumes takes it from there, and so comes to the same
parameters. With fixed codecs no step is probed.
"""

import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.abnet import channels, config, models
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs as codecs_lib
from nebula_jax.communication import ranks, selector
from nebula_jax.communication.wire import session
from nebula_jax.parallel import codec_control, codec_tape
from nebula_jax.training import cut
from nebula_jax.training import state as train_state

FILE = "tape.jsonl"
DELAY = 1  # step: both sides write the tape before the next one
SHORTEST = 1e-6  # seconds
Now = Callable[[], float]
Batch = tuple[int, Iterable[Any]]
"""A step's bucket and micro-batches, as `batches` makes them."""


class Passed(NamedTuple):
    """A micro-batch that crossed once more.

    grads: that this side would train with.
    computed: seconds in which this side computed.
    total: seconds from its beginning to its end.
    """

    grads: Any
    computed: float
    total: float


class Control:
    """The choice of codecs in one cluster.

    Attributes:
      codecs: of the run: the fixed ones, or those that change as this decides.
    """

    def __init__(
        self,
        agreed: config.Agreed,
        width: int,
        folder: pathlib.Path | None = None,
        now: Now = time.perf_counter,
    ) -> None:
        """Begins with the least lossy codecs, or with the fixed ones.

        Args:
          agreed: of the run.
          width: D of PLM-S.
          folder: of the cluster that proposes, for what its clock measured.
          now: a clock, in seconds.
        """
        self.codecs = agreed.codecs
        self._now = now
        self._tape: codec_tape.Tape | None = None
        self._tried: codec_control.Rungs | None = None
        if agreed.is_auto:
            self._tape = codec_tape.Tape(policy(agreed, width))
            self.codecs = config.chosen_codecs(self.levels)
        self._readings = codec_tape.Readings(None if folder is None else folder / FILE)
        self._round_trip = math.inf

    @property
    def _written(self) -> codec_tape.Tape:
        assert self._tape is not None  # else no step is probed
        return self._tape

    def levels(self, step: int) -> codec_control.Rungs:
        """Returns the places on the ladder by which a step sends now."""
        return self._written.rungs(step) if self._tried is None else self._tried

    def resume(self, position: Any) -> None:
        """Resumes from the `position` of a checkpoint; None at step 0.

        Raises:
          errors.NebulaError: if it is no tape of this rule.
        """
        if self._tape is None:
            return
        self._tape.resume(np.asarray(position or [], np.float32))
        self._readings.resume(is_new=position is None)

    def position(self) -> Any:
        """Returns the tape as JSON values, for a checkpoint; None with fixed codecs."""
        return None if self._tape is None else self._tape.rows.tolist()

    @property
    def described(self) -> dict[str, Any]:
        """The tape for a summary, and the rungs that follow; {} with fixed codecs."""
        if self._tape is None:
            return {}
        return {"tape": self.position(), "rungs": list(self._tape.following)}

    def is_probed(self, step: int) -> bool:
        """Returns True if a micro-batch of this step crosses twice more."""
        return self._tape is not None and self._tape.is_probed(step)

    def probe_source(
        self,
        step: int,
        half: models.Half,
        state: train_state.TrainState,
        batch: Batch,
        ends: channels.Ends,
        states: cut.States,
    ) -> cut.States:
        """Probes the codecs on the source side, and writes the tape.

        Args:
          step: that is probed; its batch has crossed.
          half: of the source.
          state: before the step.
          batch: of the step, made again.
          ends: of the source.
          states: of the half's codecs; used up.

        Returns:
          The states of the codecs.
        """
        params, passes = half.params(state), []
        bucket, micro_batches = batch
        first = next(half.with_key(micro_batches, state))
        for number in self._tries(step):
            begin = self._now()
            selected, kept, _, states = half.program.forward(
                params, first, None, states, step
            )
            jax.block_until_ready(selected.payload)
            sent = self._now()
            ends.hidden[bucket].send_payload(step, selected, number)
            received = ends.gradient[bucket].recv_payload(step, number)
            came = self._now()
            zeros = half.program.zero_grads(params)
            grads, states, _ = half.program.backward(
                params, first, None, kept, received, states, zeros
            )
            jax.block_until_ready(grads)
            end = self._now()
            passes.append(Passed(grads, (sent - begin) + (end - came), end - begin))
        self._propose(step, passes, ends.control)
        return states

    def probe_target(
        self,
        step: int,
        half: models.Half,
        state: train_state.TrainState,
        batch: Batch,
        ends: channels.Ends,
        states: cut.States,
    ) -> cut.States:
        """Probes the codecs on the target side, and writes what the source proposes.

        Args, Returns: as of `probe_source`.

        Raises:
          session.RemoteProtocolError: if the source writes what cannot follow.
        """
        params, passes = half.params(state), []
        bucket, micro_batches = batch
        first = next(half.with_key(micro_batches, state))
        for number in self._tries(step):
            received = ends.hidden[bucket].recv_payload(step, number)
            begin = self._now()
            zeros = half.program.zero_grads(params)
            reply, grads, _, states = half.program.step(
                params, first, None, received, states, zeros, step
            )
            jax.block_until_ready((reply.payload, grads))
            seconds = self._now() - begin
            ends.gradient[bucket].send_payload(step, reply, number)
            passes.append(Passed(grads, seconds, seconds))
        similar = np.float32(codec_tape.similarity(*(each.grads for each in passes)))
        ends.control.front.recv(step)
        figures = np.asarray([similar, passes[0].computed], np.float32)
        ends.control.back.send(step, figures)
        row = np.asarray(ends.control.tape.recv(step))
        try:
            probe = codec_tape.of_row(row)
            if probe.forward != similar:
                raise ValueError(f"a cosine of {probe.forward} where it was {similar}")
            self._written.write(probe)
        except ValueError as error:
            raise session.RemoteProtocolError(
                f"source wrote on the tape what cannot follow: {error}"
            ) from None
        return states

    def _tries(self, step: int) -> Iterator[int]:
        """Yields the numbers of two tries: codecs in use, then the least lossy ones."""
        in_use = self._written.rungs(step)
        for number, self._tried in enumerate((in_use, codec_control.Rungs())):
            yield number
        self._tried = None

    def _propose(
        self, step: int, passes: list[Passed], ends: channels.ControlEnds
    ) -> None:
        """Writes what both sides found in a step, and sends it as both write it."""
        in_use = self._written.rungs(step)
        similar = float(codec_tape.similarity(*(each.grads for each in passes)))
        asked = self._now()
        ends.front.send(step, np.asarray([similar], np.float32))
        there, computed = np.asarray(ends.back.recv(step)).tolist()
        # The least so far: at first programs are compiled in between.
        self._round_trip = min(self._round_trip, self._now() - asked)
        wire = passes[0].total - passes[0].computed - computed - self._round_trip
        busier = max(passes[0].computed, computed, SHORTEST)
        line_bound = max(0.0, wire) * self._share(in_use) / busier
        line_bound = self._readings.of(step, line_bound)
        row = codec_tape.as_row(
            codec_control.Probe(step, in_use, there, similar, line_bound)
        )
        # Of the root: each process of a cluster has a clock of its own.
        row = np.frombuffer(ranks.bytes_from_root(row.tobytes()), np.float32)
        ends.tape.send(step, row)
        self._written.write(codec_tape.of_row(row))
        self._readings.write(row.tolist())

    def _share(self, rungs: codec_control.Rungs) -> float:
        """Returns the busier direction's share of the bytes that crossed."""
        ways = zip(self._written.policy.sizes, rungs, strict=True)
        sizes = [of_way[rung] for of_way, rung in ways]
        return max(sizes) / sum(sizes)


def policy(agreed: config.Agreed, width: int) -> codec_control.Policy:
    """Returns the rule of a run, with the sizes of what its codecs send.

    Args:
      agreed: of the run.
      width: D of PLM-S.
    """
    longest = agreed.length_buckets[-1]
    spec = channels.hidden_spec(agreed, longest, agreed.sent_width(width))

    def most_bytes(text: str) -> int:
        variants = selector.variants(codecs_lib.from_string(text))
        return max(
            codec_lib.nbytes(codec_lib.payload_spec(each, spec)) for each in variants
        )

    sizes = tuple(map(most_bytes, config.LADDER))
    return codec_control.Policy(
        agreed.probe_every, DELAY, agreed.quality, (sizes, sizes)
    )
