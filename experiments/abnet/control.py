"""Codecs that the run chooses by itself: `--forward_codec=auto --backward_codec=auto`.

Every --probe_every steps, and sooner while others are sought, the first micro-batch of
a step crosses twice more, by the codecs in use and by the least lossy ones, and each
side compares what it would train with. Then, in this order:

    probe.front  source -> target  [1] float32, cosine of the source's gradients
    probe.back   target -> source  [2] float32, that of the target's; its seconds
    decisions    source -> target  [6] float32, the probe as both write it

The source measures how long the line takes, and so proposes; `parallel.codec_control`
decides, the same on both sides. What was measured is also in the file
`decisions.jsonl` of the source's folder: a run that resumes takes it from there, and so
comes to the same parameters. With fixed codecs no step is probed.
"""

import math
import pathlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.abnet import channels, config, models
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs as codecs_lib
from nebula_jax.communication import ranks, selector
from nebula_jax.communication.wire import session
from nebula_jax.parallel import codec_control
from nebula_jax.training import cut
from nebula_jax.training import state as train_state

FILE = "decisions.jsonl"
SHORTEST = 1e-6  # seconds


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
        self, agreed: config.Agreed, width: int, folder: pathlib.Path | None = None
    ) -> None:
        """Begins with the least lossy codecs, or with the fixed ones.

        Args:
          width: D of PLM-S.
          folder: of the cluster that proposes, for what its clock measured.
        """
        self.codecs = agreed.codecs
        self._decisions: codec_control.DecisionLog | None = None
        self._tried: codec_control.Levels | None = None
        if agreed.is_auto:
            self._decisions = codec_control.DecisionLog(policy(agreed, width))
            self.codecs = config.chosen_codecs(self._levels)
        self._readings = codec_control.Readings(folder and folder / FILE)
        self._round_trip = math.inf

    @property
    def _written(self) -> codec_control.DecisionLog:
        assert self._decisions is not None  # else no step is probed
        return self._decisions

    def _levels(self, step: int) -> codec_control.Levels:
        """Returns the places on the schedule by which a step sends now."""
        return self._tried or self._written.levels(step)

    def resume(self, position: Any) -> None:
        """Resumes from the `position` of a checkpoint; None at step 0.

        Raises:
          errors.NebulaError: if it is no decision log of this rule.
        """
        if self._decisions is not None:
            self._decisions.resume(position or [])
            self._readings.resume(is_new=position is None)

    def position(self) -> Any:
        """Returns the decision log for a checkpoint; None with fixed codecs."""
        return None if self._decisions is None else self._decisions.rows

    @property
    def described(self) -> dict[str, Any]:
        """The decision log and the levels that follow; {} with fixed codecs."""
        if self._decisions is None:
            return {}
        return {
            "decisions": self._decisions.rows,
            "levels": list(self._decisions.following),
        }

    def is_probed(self, step: int) -> bool:
        """Returns True if a micro-batch of this step crosses twice more."""
        return self._decisions is not None and self._decisions.is_probed(step)

    def probe(
        self,
        step: int,
        half: models.Half,
        state: train_state.TrainState,
        batch: tuple[int, Iterable[Any]],
        ends: channels.Ends,
        states: cut.States,
    ) -> cut.States:
        """Probes the codecs, and writes the decision log: the source proposes what.

        Args:
          batch: of the step, made again by `data`.
          states: of the half's codecs; used up.

        Raises:
          session.RemoteProtocolError: if the source writes what cannot follow.
        """
        params, passes = half.params(state), []
        bucket, micro_batches = batch
        given = (params, next(half.with_key(micro_batches, state)))
        is_source = isinstance(half.program, cut.Front)
        cross = _through_front if is_source else _through_back
        line = (ends.hidden[bucket], ends.gradient[bucket])
        tries = self._written.levels(step), codec_control.Levels()
        for number, self._tried in enumerate(tries):
            passed, states = cross(half.program, given, line, states, (step, number))
            passes.append(passed)
        self._tried = None
        (self._propose if is_source else self._accept)(step, passes, ends.control)
        return states

    def _propose(
        self, step: int, passes: list[Passed], ends: channels.ControlEnds
    ) -> None:
        """Writes what both sides found in a step, and sends it as both write it."""
        in_use = self._written.levels(step)
        similar = float(codec_control.similarity(*(each.grads for each in passes)))
        asked = time.perf_counter()
        ends.front.send(step, np.asarray([similar], np.float32))
        there, computed = np.asarray(ends.back.recv(step)).tolist()
        # The least so far: at first programs are compiled in between.
        self._round_trip = min(self._round_trip, time.perf_counter() - asked)
        wire = passes[0].total - passes[0].computed - computed - self._round_trip
        busier = max(passes[0].computed, computed, SHORTEST)
        ways = zip(self._written.policy.sizes, in_use, strict=True)
        sizes = [of_way[level] for of_way, level in ways]
        line_bound = max(0.0, wire) * (max(sizes) / sum(sizes)) / busier
        line_bound = self._readings.of(step, line_bound)
        row = codec_control.Probe(step, in_use, there, similar, line_bound).row
        # Of the root: each process of a cluster has a clock of its own.
        row = np.frombuffer(ranks.bytes_from_root(row.tobytes()), np.float32)
        ends.decisions.send(step, row)
        self._written.write(codec_control.of_row(row))
        self._readings.write(row.tolist())

    def _accept(
        self, step: int, passes: list[Passed], ends: channels.ControlEnds
    ) -> None:
        """Sends what this side found, and writes what the source proposes."""
        similar = np.float32(codec_control.similarity(*(each.grads for each in passes)))
        ends.front.recv(step)
        ends.back.send(step, np.asarray([similar, passes[0].computed], np.float32))
        row = np.asarray(ends.decisions.recv(step))
        try:
            probe = codec_control.of_row(row)
            if probe.forward != similar:
                raise ValueError(f"a cosine of {probe.forward} where it was {similar}")
            self._written.write(probe)
        except ValueError as error:
            raise session.RemoteProtocolError(
                f"source wrote to the decision log what cannot follow: {error}"
            ) from None


def _through_front(
    front: cut.Front, given: Any, line: Any, states: cut.States, tag: tuple[int, int]
) -> tuple[Passed, cut.States]:
    """Sends a micro-batch, and takes the backward pass with the gradient that comes."""
    (params, batch), (hidden, gradient), (step, number) = given, line, tag
    begin = time.perf_counter()
    selected, kept, _, states = front.forward(params, batch, None, states, step)
    jax.block_until_ready(selected.payload)
    sent = time.perf_counter()
    hidden.send_payload(step, selected, number)
    received = gradient.recv_payload(step, number)
    came = time.perf_counter()
    zeros = front.zero_grads(params)
    grads, states, _ = front.backward(
        params, batch, None, kept, received, states, zeros
    )
    jax.block_until_ready(grads)
    end = time.perf_counter()
    return Passed(grads, (sent - begin) + (end - came), end - begin), states


def _through_back(
    back: cut.Back, given: Any, line: Any, states: cut.States, tag: tuple[int, int]
) -> tuple[Passed, cut.States]:
    """Answers a micro-batch."""
    (params, batch), (hidden, gradient), (step, number) = given, line, tag
    received = hidden.recv_payload(step, number)
    begin = time.perf_counter()
    zeros = back.zero_grads(params)
    reply, grads, _, states = back.step(
        params, batch, None, received, states, zeros, step
    )
    jax.block_until_ready((reply.payload, grads))
    seconds = time.perf_counter() - begin
    gradient.send_payload(step, reply, number)
    return Passed(grads, seconds, seconds), states


def policy(agreed: config.Agreed, width: int) -> codec_control.Policy:
    """Returns the rule of a run, with the sizes of what its codecs send."""
    longest = agreed.length_buckets[-1]
    spec = channels.hidden_spec(agreed, longest, agreed.sent_width(width))

    def most_bytes(text: str) -> int:
        variants = selector.as_selector(codecs_lib.from_string(text)).codecs
        return max(
            codec_lib.nbytes(codec_lib.payload_spec(each, spec)) for each in variants
        )

    sizes = tuple(map(most_bytes, config.SCHEDULE))
    return codec_control.Policy(agreed.probe_every, agreed.quality, (sizes, sizes))
