"""Local steps in a loop: every cluster trains a replica, and rounds average them.

    rounds = local_steps.begin(context, peers, params, settings.Settings(inner_steps=9))
    start, is_behind = rounds.agree_start(saved)
    ...                                      # restores params and rounds
    context.begin(start, peers.lines)
    for step in context.each(rounds.steps()):
        params = train_step(params, batch(step, rounds.share))
        params = rounds.after(step, params)
        if rounds.is_saved_after(step):
            saved.save(rounds.step, [params, rounds.values])

`after` sends what is due, applies what has come, ends at the anchors after the last
step of the run, and finds out that a cluster requests the end: all then end after the
same step. Parameters are any pytree; the inner optimizer is the loop's own affair.

R clusters, P fragments.
"""

import copy
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.codecs import privacy
from nebula_jax.communication.link import Link
from nebula_jax.communication.worker_link import AnyLink
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.parallel.local_steps import rounds as rounds_lib
from nebula_jax.parallel.local_steps import settings as settings_lib
from nebula_jax.parallel.local_steps.quorum import hub as hub_lib
from nebula_jax.parallel.local_steps.quorum import leaf as leaf_lib
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import diloco, partition

NOTHING = jax.ShapeDtypeStruct((), "uint8")  # of a channel on which nothing is sent
EVERY = 10
"""Steps between two times that the processes of an only cluster agree on its end."""


class Rounds:
    """The rounds of this process's replica, or of those of all clusters.

    A pytree of its state: the anchors, the outer optimizer, what the codec remembers,
    and counts. One that is made of other values, as from a checkpoint, resumes there.
    """

    def __init__(
        self,
        context: context_lib.Context,
        members: Sequence[member_lib.Member],
        ends: rounds_lib.LocalRounds | hub_lib.Hub | leaf_lib.Leaf | None = None,
        peers: all_clusters.Peers | None = None,
        share: settings_lib.Share = settings_lib.ALONE,
    ) -> None:
        """Takes what `begin` or `in_one_process` made; without rounds no `ends`."""
        self._context = context
        self.members = list(members)  # parts in the rounds; none with one cluster
        self._ends, self._peers, self.share = ends, peers, share
        self._is_stopping = False
        self._restored: Any = None  # values that are yet to be taken
        self._replaced: list[tuple[Any, Any]] = []  # references to leaves

    # In the loop.

    @property
    def step(self) -> int:
        """The step of the run; with a quorum, `after` may come to a later one."""
        return self._context.step

    def steps(self) -> Iterator[int]:
        """Yields the steps that follow, until the run is complete or stopped."""
        while not self.is_over:
            step = self.step + 1
            yield step
            if self._ends is not None and self._ends.step < step:
                raise errors.SettingsError(
                    f"step {step} is over without its round; call"
                    f" params = rounds.after({step}, params) in every step of the loop"
                )

    def after(self, step: int, params: Any) -> Any:
        """Sends and applies what is due after inner step `step`, counted from 1.

        Returns the parameters to go on with, which the next step may use up; after the
        last step those that all clusters have alike. Raises member.RoundError, which
        names the sender, if a message cannot be of its round.
        """
        [found] = self.after_all(step, [params])
        pairs = zip(*map(jax.tree.leaves, (params, found)), strict=True)
        self._replaced = [
            (weakref.ref(old), weakref.ref(new))
            for old, new in pairs
            if old is not new and isinstance(old, jax.Array)
        ]
        return found

    def is_lost(self, values: Any) -> bool:
        """Returns True if values have what `after` was given, not what it returned."""
        leaves = jax.tree.leaves(values, is_leaf=lambda node: isinstance(node, Rounds))
        kept = set(map(id, leaves))
        return any(
            id(old()) in kept and id(new()) not in kept for old, new in self._replaced
        )

    def after_all(self, step: int, params: Sequence[Any]) -> list[Any]:
        """Does what `after` does, for the replicas of all clusters in one process."""
        self._take_restored()
        is_requested, self._context.step = self._context.stop_requested(), step
        if self._ends is None:
            if ranks.count() == 1 or step % EVERY == 0:
                self._is_stopping |= bool(ranks.agree(is_requested))
            return list(params)
        found, heads = self._ends.after(
            step, params, lambda: bool(ranks.agree(is_requested))
        )
        # Rounds went on without this cluster: it skips their steps.
        self._context.step = self._ends.step
        # Requests travel in the heads: all clusters stop after the same round.
        self._is_stopping |= any(head.is_stopping for head in heads)
        if self._peers is not None and (asking := self.members[0].asking):
            process.message(
                f"stopping, all clusters save step {self.step}:"
                f" {' and '.join(asking)} asked to stop"
            )
        if self.is_last:
            found = self._ends.finish(self.step, found)
        return found

    @property
    def is_last(self) -> bool:
        """True if the run is complete."""
        return self._is_last(self.step)

    @property
    def is_over(self) -> bool:
        """True if no step follows: the run is complete, or a cluster has stopped it."""
        return self._is_stopping or self.is_last

    def _is_last(self, step: int) -> bool:
        return step >= self._context.settings.steps

    # In a checkpoint.

    def agree_start(self, saved: checkpoints.Checkpoints) -> tuple[int, bool]:
        """Agrees with the others on where the run resumes, once all channels are open.

        With a quorum that is the hub's newest checkpoint; a cluster without it gets the
        state of the run, and `saved` keeps the checkpoints that clusters so far apart
        need. Returns the step whose checkpoint is to be restored, 0 for none; and True
        if the run is at a later step, whose state is to come. Raises errors.NebulaError
        as `all_clusters.agree_start` and `leaf.Leaf.begin`.
        """
        start, is_behind = self._agreed_start(saved)
        self.report_growth(saved, start)
        return start, is_behind

    def report_growth(self, saved: checkpoints.Checkpoints, start: int) -> None:
        """Reports what a run with more steps than it had keeps of its former end."""
        now = self._context.settings.steps
        has_ended = 0 < start == saved.steps_of_run(start) < now
        if has_ended and self.members and self.members[0].config.last_rounds(start):
            process.message(
                f"the run of {start} steps ended with a short round, from which this"
                f" one goes on: a run of {now} steps from its beginning has none there"
            )

    def _agreed_start(self, saved: checkpoints.Checkpoints) -> tuple[int, bool]:
        assert self._peers is not None  # else there is nobody to agree with
        settings = self._context.settings
        every, timeout = settings.checkpoint_every, settings.connection.connect_timeout
        saved.widen(self.window)
        if isinstance(self._ends, hub_lib.Hub):
            start = saved.newest
            if start == 0:  # else what the others have would be given up
                links = self._peers.links.items()
                steps = {name: link.peer.checkpoints for name, link in links}
                steps |= {"the hub": ()}
                checkpoints.newest_of_all(steps, every, self.window)
            self._ends.begin(start)
            return start, False
        if isinstance(self._ends, leaf_lib.Leaf):
            there = self._ends.begin(timeout, saved.steps)
            start = max(step for step in (0, *saved.steps) if step <= there)
            return start, start < there
        start = all_clusters.agree_start(self._peers, every, self.window, timeout)
        return start, False

    @property
    def window(self) -> int:
        """The steps that one cluster may be ahead of another."""
        if not self.members:
            return 0
        config = self.members[0].config
        return config.inner_steps + config.delay

    def is_saved_after(self, step: int) -> bool:
        """Returns True at the end, or if a checkpoint is due and nothing in flight."""
        every = self._context.settings.checkpoint_every
        if self._is_stopping or self._is_last(step):
            return True
        if not self.members:
            return step % every == 0
        return self.members[0].config.is_saved_after(step, every)

    @property
    def values(self) -> dict[str, Any]:
        """The whole state: arrays and integers; none if there is one cluster."""
        if self._restored is not None:
            return self._restored
        if not self.members:
            return {}
        return self.members[0].arrays | self.members[0].position

    def _with(self, values: dict[str, Any]) -> "Rounds":
        made = copy.copy(self)
        made._restored = values
        return made

    def _take_restored(self) -> None:
        values, self._restored = self._restored, None
        if values and self.members:
            position = {"versions": list(map(int, values["versions"]))}
            self.members[0].resume(values, position)

    @property
    def described(self) -> dict[str, Any]:
        """The figures of the rounds for a summary, as JSON values."""
        if self._ends is None:
            return {}
        member = self.members[0]
        found = privacy.described(member.codec, member.codecs)
        return self._ends.described | ({"privacy": found} if found else {})


jax.tree_util.register_pytree_with_keys(
    Rounds,
    lambda rounds: (((jax.tree_util.GetAttrKey("values"), rounds.values),), rounds),
    lambda rounds, values: rounds._with(*values),
)


def begin(
    context: context_lib.Context,
    peers: all_clusters.Peers,
    params: Any,
    settings: settings_lib.Settings,
) -> Rounds:
    """Begins local steps on a model of any kind, from the same parameters everywhere.

    Without other clusters nothing is sent; with a quorum they may return. `params` are
    any pytree of arrays: those of step 0, in every cluster the same, also where the run
    resumes from a checkpoint. Or specs of them, with shardings, for `Rounds.resume` to
    bring the first anchors. Raises errors.SettingsError, which begins with a setting's
    name.
    """
    names, own = peers.clusters, peers.hello.cluster
    share = settings.share(names.index(own), len(names))
    member = member_lib.Member(settings, names, own, params)
    if len(names) == 1:
        return Rounds(context, [], peers=peers, share=share)
    settings.check_quorum(names, peers.hub)
    about = dataclasses.asdict(member.config) | {
        "codec": member.codec.name,
        "shares": share.parts,
        "quorum": settings.quorum,
        "layout": member.fingerprint,
    }
    compared = [f"{name}={value}" for name, value in about.items()]
    if not member_lib.is_planned(params):
        compared.append(f"parameters at step 0 with the digest {_digest(params)}")
    for link in peers.links.values():
        _open_compared(link, compared)
    ends: rounds_lib.LocalRounds | hub_lib.Hub | leaf_lib.Leaf
    if not settings.quorum:
        exchange = rounds_lib.Exchange(
            names, own, peers.links, member.specs, member.codec, hub=peers.hub
        )
        ends = rounds_lib.LocalRounds([member], exchange)
    elif own == peers.hub:
        ends = _hub(context, peers, member, settings, compared)
    else:
        link = _of_one_process(peers.links[peers.hub])
        ends = leaf_lib.Leaf(member, names, own, link, context.settings.steps)
    return Rounds(context, [member], ends, peers, share)


def _digest(params: Any) -> str:
    """Returns a digest of all floating-point parameters, also those that are frozen."""
    found = {
        path: np.frombuffer(diloco.digest({"": ranks.everywhere(leaf)}), np.uint8)
        for path, leaf in partition.named(params)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    return diloco.digest(found).hex()[:16]


def in_one_process(
    context: context_lib.Context,
    names: Sequence[str],
    params: Any,
    settings: settings_lib.Settings,
) -> Rounds:
    """Returns the rounds of the replicas of all clusters, without a line."""
    if len(names) == 1:
        return Rounds(context, [])
    members = [member_lib.Member(settings, names, own, params) for own in names]
    return Rounds(context, members, rounds_lib.LocalRounds(members))


def _hub(
    context: context_lib.Context,
    peers: all_clusters.Peers,
    member: member_lib.Member,
    settings: settings_lib.Settings,
    compared: Sequence[str],
) -> hub_lib.Hub:
    """Opens the hub's channels; the arguments are those of `begin`."""
    seconds = context.settings.connection.reconnect_timeout
    return hub_lib.Hub(
        member,
        peers.clusters,
        peers.hub,
        {name: _of_one_process(link) for name, link in peers.links.items()},
        hub_lib.Rule(settings.quorum, settings.grace, timeout=seconds),
        rejoined=lambda: _rejoined(peers, compared),
        work=context.work,
        log=process.message,
    )


def _open_compared(link: AnyLink, texts: Sequence[str]) -> None:
    """Opens channels that nothing is sent on: the clusters compare their names."""
    for text in texts:
        link.sender(text, NOTHING, codec_lib.identity())
        link.receiver(text, NOTHING, codec_lib.identity())


def _rejoined(peers: all_clusters.Peers, compared: Sequence[str]) -> Link | None:
    link = peers.rejoined()
    if link is not None:
        _open_compared(link, compared)
    return _of_one_process(link)


def _of_one_process(link: Any) -> Any:
    if link is not None and not isinstance(link, Link):
        # Processes would have to agree on what has arrived, time and again.
        raise errors.SettingsError("quorum is for clusters of one process each")
    return link
