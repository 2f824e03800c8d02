"""Translation over the line between two sites, with a side of a run at each.

    sentences  source -> target  hidden states of some sentences, by the forward codec
    words      target -> source  their translations

The source site has the sentences, PLM-S and the checkpoints of `source`; the target
site has PLM-T and those of `target`. They connect as in training, agree on the newest
step that both have saved, and translate until the source site has no more.

B sentences that cross together.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.abnet import channels, config, models, sides, target_model, translator
from nebula_jax import errors, strict_json
from nebula_jax.communication import bridge
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, session
from nebula_jax.models import transformer
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import checkpoint, checkpoint_files


class Site(NamedTuple):
    """A site that is connected to the other one."""

    link: Link
    other: transformer.Config  # shape of the other side's pretrained model
    trained: Any
    sentences: Any  # end of the channel, as `words`
    words: Any


def translate(
    run: config.Run,
    rows: int,
    parts: Iterator[Sequence[tuple[int, str]]],
    write: Callable[[Sequence[str]], None],
) -> None:
    """Translates sentences at the source site, `rows` (B, BATCH at most) together.

    Sentences have their numbers. Each part is translated, and given to `write`, before
    the next. Raises errors.NebulaError if the target site cannot be reached, is of
    another run, goes, or sends what cannot be.
    """
    plm, work = models.load_source(run), activity.Work(run.local.stuck_timeout)
    with _connected(run, models.SOURCE, plm, work, rows) as site:
        side = translator.Source(run, plm, site.other, site.trained)
        numbers = itertools.count(1)

        def words(hidden: Any) -> list[str]:
            number = next(numbers)
            site.sentences.send(number, hidden)
            return _words(np.asarray(site.words.recv(number)), rows)

        while True:
            # A person may type, who takes any time: the target does not call it stuck.
            with work.busy(activity.Activity.WAITING_FOR_ANOTHER):
                part = next(parts, None)
            if part is None:
                return
            write(side.translate(part, rows, words))


def serve(run: config.Run) -> None:
    """Translates at the target site what the source site reads, until that ends.

    Raises errors.NebulaError if the source site does not come, is of another run, goes,
    or sends what cannot be.
    """
    plm, work = target_model.load(run), activity.Work(run.local.stuck_timeout)
    with _connected(run, models.TARGET, plm, work) as site:
        side = translator.Target(run, plm, site.other, site.trained)
        process.message(f"translating for {site.link.peer.cluster}")
        [room] = site.words.format.buffer_sizes()[0]
        for number in itertools.count(1):
            if not site.link.wait_for_any("a sentence"):
                return
            found = side.words(site.sentences.recv(number))
            text = json.dumps(found, ensure_ascii=False).encode()
            page = np.frombuffer(text.ljust(room, b"\0"), np.uint8)
            site.words.send(number, page)


@contextlib.contextmanager
def _connected(
    run: config.Run, side: int, plm: models.Plm, work: activity.Work, rows: int = 0
) -> Iterator[Site]:
    """Connects to the other site, with the checkpoint of which both have the step."""
    role, local = models.ROLES[side], run.local
    folder = checkpoints.folder_of(local.workdir, role)
    steps = checkpoint_files.verified_steps(folder, process.message)
    if not steps:
        raise errors.SettingsError(
            f"--run={local.workdir}: no checkpoint of {role} is there"
        )
    known = checkpoint_files.about(folder, steps[-1])["fingerprints"]
    hello = run.hello(
        config.settings(run),
        steps,
        model=dataclasses.asdict(plm.model.config),
        fingerprints={name: known[name] for name in known if name.startswith(role)},
        rows=rows,
    )

    def check(peer: frames.Hello) -> None:
        for name, value in sides.peer_fingerprints(peer).items():
            if known.get(name, value) != value:
                raise bridge.Mismatch(
                    f"{peer.cluster} has a side of another run: {name} is {value},"
                    f" {role} was trained with {known[name]}"
                )
        if not {*steps} & {*peer.checkpoints}:
            here, there = (
                ", ".join(map(str, each)) for each in (steps, peer.checkpoints)
            )
            raise bridge.Mismatch(
                f"no step is saved at both sites: {role} has {here}; {peer.cluster} has"
                f" {there or 'none'}"
            )

    with all_clusters.connected(
        local.connection(), hello, config.CLUSTERS, check=check, work=work
    ) as peers:
        [link] = peers.links.values()
        assert isinstance(link, Link)  # a site is one process
        other = sides.peer_model(link.peer)
        width = plm.model.config.width if side == models.SOURCE else other.width
        rows = rows or _rows(link.peer)
        ends = channels.translation_ends(run.agreed, link, role, rows, width)
        step = all_clusters.agree_start(
            peers, run.agreed.checkpoint_every, 0, local.connect_timeout
        )
        trained = checkpoint.read(folder, step)["state"]["params"]
        yield Site(link, other, trained, **ends)


def _rows(peer: frames.Hello) -> int:
    """Returns how many sentences the source site sends together."""
    rows = peer.details.get("rows")
    if type(rows) is not int or not 0 < rows <= translator.BATCH:
        raise bridge.Mismatch(f"{peer.cluster} did not say how many sentences it sends")
    return rows


def _words(page: np.ndarray, rows: int) -> list[str]:
    """Reads translations as the target site has sent them."""
    try:
        found = strict_json.loads(page.tobytes().rstrip(b"\0"))
        is_sound = isinstance(found, list) and len(found) == rows
        "".join(found).encode()  # JSON may have half of a surrogate pair
    except (ValueError, TypeError):
        is_sound = False
    if not is_sound:
        raise session.RemoteProtocolError("target sent no lines of text as words")
    return found
