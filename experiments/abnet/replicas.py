"""Several pairs that train one translator: local steps join what their sides train.

Each side has rounds of its own (`parallel.rounds`): the targets exchange what
they train among themselves, and so do the sources, after the same steps. Of one pair
there are no rounds, and nothing here does anything.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.abnet import config, models, pairs
from nebula_jax import errors
from nebula_jax.communication import channels, ranks
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace, rules
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.parallel.local_steps import messages, rounds
from nebula_jax.training import state as train_state

States = list[train_state.TrainState]


def member(
    agreed: config.Agreed,
    cluster: str,
    half: models.Half,
    folder: pathlib.Path | None = None,
) -> member_lib.Member | None:
    """Returns a cluster's part in the rounds of its side; None if there is one pair.

    Args:
      agreed: settings of the run.
      cluster: its name.
      half: of the model, that it trains.
      folder: of the cluster.

    Raises:
      errors.SettingsError: if fragments do not divide the layers, or a receiver of the
        codec remembers what came before.
    """
    if agreed.replicas == 1:
        return None
    shapes = half.fresh.shapes.params
    try:
        return member_lib.Member(
            *(agreed.local_steps(), agreed.compression().codec),
            *(pairs.names(agreed, pairs.role_of(cluster)), cluster),
            *(shapes, half.fresh.sharding.params),
        )
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        flag = "--fragments" if field == "fragments" else "--delta_codec"
        raise errors.SettingsError(f"{flag}={rest or error}") from None


def planned(
    fresh: mesh_lib.ShardedInit, mesh: Mesh, member: member_lib.Member | None
) -> mesh_lib.ShardedInit:
    """Plans a cluster's arrays with those of its rounds, as `rounds`.

    Args:
      fresh: {"state", "codecs"}.
      mesh: of the cluster.
      member: its part in the rounds; None if there are none.
    """
    if member is None:
        return fresh

    def make() -> dict[str, Any]:
        values = fresh.init()
        return values | {"rounds": member.first(values["state"].params)}

    shapes = {"rounds": jax.eval_shape(member.first, fresh.shapes["state"].params)}
    placed = rules.shardings(mesh, rules.RULES, shapes)
    return mesh_lib.ShardedInit(make, fresh.shapes | shapes, fresh.sharding | placed)


class Rounds:
    """The rounds of one side, for the copies of it that this process trains."""

    def __init__(
        self,
        agreed: config.Agreed,
        members: Sequence[member_lib.Member | None],
        cluster: str = "",
        links: Mapping[str, channels.Carrier] | None = None,
    ) -> None:
        """Opens the channels to the other clusters of the side.

        Args:
          agreed: settings of the run.
          members: this cluster's, or those of all clusters of the side.
          cluster: name of this one.
          links: to the others; None if all are in this process.
        """
        self._members = [each for each in members if each is not None]
        self._rounds: rounds.LocalRounds | None = None
        if not self._members:
            return
        ends = None
        if links is not None:
            [own] = self._members
            ends = rounds.Exchange(
                *(pairs.names(agreed, pairs.role_of(cluster)), cluster, links),
                *(own.specs, own.codec, agreed.compression().zstd),
            )
        self._rounds = rounds.LocalRounds(self._members, ends)

    def go_on(self, restored: Sequence[Mapping[str, Any]], positions: Any) -> None:
        """Goes on from a checkpoint of each copy, or from the beginning.

        Args:
          restored: arrays of each, as planned.
          positions: of each, like `position`; None at step 0.
        """
        if self._members:
            for each in zip(self._members, restored, positions, strict=True):
                member, arrays, position = each
                member.resume(arrays["rounds"], position)

    def arrays(self, copy: int = 0) -> dict[str, Any]:
        """Returns the arrays that belong into a copy's checkpoint, as planned."""
        return {"rounds": self._members[copy].arrays} if self._members else {}

    def position(self, copy: int = 0) -> Any:
        """Returns the rest of a copy's state, as JSON values; None if there is none."""
        return self._members[copy].position if self._members else None

    def after(
        self,
        step: int,
        states: States,
        now: rounds.Now = rounds.no_news,
    ) -> tuple[States, list[messages.Head]]:
        """Sends what is to be sent after a step, and applies what is due.

        Args:
          step: just taken.
          states: after it, of the copies in this process.
          now: see `rounds`.

        Returns:
          The states, and the heads of the round that was applied, if any.
        """
        if self._rounds is None:
            return states, []
        params = [state.params for state in states]
        joined, heads = self._rounds.after(step, params, now)
        return _with_params(states, joined), heads

    def finish(self, step: int, states: States) -> States:
        """Takes the last rounds of a run, after which all copies are the same."""
        if self._rounds is None:
            return states
        params = [state.params for state in states]
        return _with_params(states, self._rounds.finish(step, params))

    @property
    def described(self) -> dict[str, Any]:
        """The figures of the rounds for a summary; {} if there are none."""
        return self._rounds.described if self._rounds is not None else {}


def _with_params(states: States, params: Sequence[Any]) -> States:
    return [
        dataclasses.replace(state, params=each)
        for state, each in zip(states, params, strict=True)
    ]


class Ending:
    """The end of a run on request, in a target: all pairs end after the same step.

    Of one pair the target ends it when it likes. With several a request goes to the
    other targets with the next round, and all end with the step after that.
    """

    def __init__(
        self,
        agreed: config.Agreed,
        link: pace.LeaderLink,
        start: int,
        is_requested: Callable[[], bool],
    ) -> None:
        """Begins after step `start`.

        Args:
          agreed: settings of the run.
          link: to the source of this pair, which may request the end too.
          start: the step that the run goes on after.
          is_requested: True once this cluster should end.
        """
        self._config = agreed.local_steps() if agreed.replicas > 1 else None
        self._link, self._is_requested = link, is_requested
        self._step, self._is_agreed = start, False
        self.follower = link if self._config is None else _Follower(link)
        """The source, for `pace.Lead`."""

    def now(self) -> tuple[int, bool]:
        """Returns what a message has of it: no time, and True to request the end."""
        is_requested = self._is_requested() or self._link.stop_step is not None
        return 0, bool(ranks.agree(int(is_requested)))

    def take(self, step: int, heads: Sequence[messages.Head]) -> None:
        """Takes the heads of a round that was applied after a step, if one was."""
        self._step = step
        self._is_agreed |= any(head.is_stopping for head in heads)

    def is_due(self) -> bool:
        """Returns True if the run ends with the step that comes now.

        Not while a message is under way after it: it could not be saved.
        """
        if self._config is None:
            return self._is_requested()
        return self._is_agreed and not self._config.is_in_flight(self._step + 1)


class _Follower:
    """A source whose request to end the run is for all targets, not for its own."""

    stop_step: int | None = None

    def __init__(self, link: pace.LeaderLink) -> None:
        self.step_done, self.stop = link.step_done, link.stop
