"""Attacks on the hidden states H^E, for each codec and each depth of the cut.

An attacker gets the hidden states of all rows. Of its own ones it has the text as well,
and with these it trains; the others it attacks. The worst case for the source cluster:
an attacker who has the adapters too, as the other side of a finished translator does,
can make such pairs of any text.

N rows, L length, D width, V pieces.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax.evaluation import leakage
from scripts.leaks import victim as victims
from scripts.leaks.line import Line

nearest_by_position = jax.jit(jax.vmap(leakage.nearest, (1, 0), 1))
"""(hidden states [N, L, D], tables [L, V, D]) -> guesses [N, L, G]."""


class Training(NamedTuple):
    """The training of an inverter.

    steps: of Adam.
    batch: tokens of a step.
    """

    steps: int = leakage.STEPS
    batch: int = leakage.BATCH


def _text(rows: victims.Rows, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the chosen rows have text, [n, L] bool, and its pieces, [t]."""
    pieces = rows.pieces[chosen]
    is_text = pieces != victims.NO_PIECE
    return is_text, pieces[is_text]


def baseline(rows: victims.Rows, sides: victims.Sides) -> dict[str, Any]:
    """Returns what an attacker's own text alone gives, and its size.

    Returns:
      most_frequent, unigram: of `leakage.chance`. seen: share of the attacked tokens
      whose piece the attacker's own text has. tokens, own_tokens: how many there are.
    """
    _, labels = _text(rows, sides.attacked)
    _, own = _text(rows, sides.own)
    chance = leakage.chance(own, labels, len(rows.candidates))
    return {
        "most_frequent": chance.most_frequent._asdict(),
        "unigram": chance.unigram,
        "seen": float(np.isin(labels, own).mean()),
        "tokens": len(labels),
        "own_tokens": len(own),
    }


class Attacks:
    """The attacks on one model; what several codecs leave alike is attacked once."""

    def __init__(
        self,
        rows: victims.Rows,
        tables: victims.Tables,
        sides: Mapping[int, victims.Sides],
        training: Training,
    ) -> None:
        """Prepares them.

        Args:
          rows: of the source side.
          tables: public embeddings.
          sides: seed -> rows of the attacker with this seed.
          training: of the inverters.
        """
        self._rows, self._tables, self._sides = rows, tables, sides
        self._training = training
        self._done: dict[str, list[dict[str, Any]]] = {}

    def run(self, received: np.ndarray) -> dict[str, Any]:
        """Attacks hidden states with every seed.

        Args:
          received: [N, L, D] float32.

        Returns:
          nearest, inversion: a list of `leakage.Recovery` as dicts, one for each seed.
        """
        key = hashlib.sha256(received[self._rows.mask].tobytes()).hexdigest()
        if key not in self._done:
            self._done[key] = [self._attack(received, seed) for seed in self._sides]
        found = self._done[key]
        return {name: [each[name] for each in found] for name in found[0]}

    def _attack(self, received: np.ndarray, seed: int) -> dict[str, Any]:
        """Attacks hidden states as one attacker."""
        sides, tables = self._sides[seed], self._tables
        is_text, labels = _text(self._rows, sides.attacked)
        is_own_text, own_labels = _text(self._rows, sides.own)
        attacked = received[sides.attacked]
        near = nearest_by_position(attacked, tables.by_position)
        inverter = leakage.fit_inverter(
            received[sides.own][is_own_text],
            own_labels,
            tables.embeddings,
            jax.random.key(seed),
            **self._training._asdict(),
        )
        inverted = leakage.invert(inverter, attacked[is_text], tables.embeddings)
        near, inverted = jax.device_get((near, inverted))
        return {
            "nearest": leakage.recovery(near[is_text], labels)._asdict(),
            "inversion": leakage.recovery(inverted, labels)._asdict(),
        }


def by_codec(
    attacks: Attacks,
    encode: victims.Encode,
    mask: np.ndarray,
    depths: Sequence[int],
    lines: Mapping[str, Line],
    report: Callable[[str], Any],
) -> dict[str, list[dict[str, Any]]]:
    """Attacks what every codec leaves of the hidden states after each depth.

    Args:
      attacks: on the model.
      encode: of the model.
      mask: [N, L] bool.
      depths: layers before the cut.
      lines: codec -> its channel.
      report: called with each codec and depth that is done.

    Returns:
      Codec -> for each depth: depth, ratio, and the figures of `Attacks.run`.
    """
    found: dict[str, list[dict[str, Any]]] = {codec: [] for codec in lines}
    for depth in depths:
        hidden = encode(depth)
        for codec, line in lines.items():
            received = line.send(hidden, mask)
            figures = attacks.run(received.arrays)
            found[codec].append({"depth": depth, "ratio": received.ratio, **figures})
            report(f"{codec}, cut after {depth} layers")
    return found
