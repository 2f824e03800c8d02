"""Attacks on the hidden states of a cut.

An attacker gets the hidden states of all rows. Of its own ones it has the text as well,
and with these it trains; the others it attacks. The worst case for the source cluster:
an attacker who has the adapters too, as the other side of a finished translator does,
can make such pairs of any text.

N rows, B rows of a batch, L length, D width, V pieces.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, loopback, selector
from nebula_jax.evaluation import leakage
from scripts.leaks import attacked_model

nearest_by_position = jax.jit(jax.vmap(leakage.nearest, (1, 0), 1))
"""(hidden states [N, L, D], tables [L, V, D]) -> guesses [N, L, G]."""


class Received(NamedTuple):
    """The arrays of a receiver.

    arrays: [N, L, D] float32, decoded.
    ratio: bytes of the payloads over those of padded float32, as in Table 5 but for the
      heads of frames.
    """

    arrays: np.ndarray
    ratio: float


def line(
    codec: str, batch_size: int, length: int, width: int
) -> Callable[[np.ndarray, np.ndarray], Received]:
    """Opens both ends of a channel in this process, whose programs are compiled once.

    Args:
      codec: as in a flag.
      batch_size: B; what a codec loses may depend on what is encoded together.

    Returns:
      (hidden states [N, L, D] float32, mask [N, L] bool) -> Received, micro-batch by
      micro-batch, as a run sends them.
    """
    made = codecs.from_string(codec)
    spec = {
        "hidden": jax.ShapeDtypeStruct((batch_size, length, width), jnp.float32),
        "mask": jax.ShapeDtypeStruct((batch_size, length), jnp.bool_),
        "index": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    }
    carrier = loopback.Loopback()
    ends = carrier.sender("hidden", spec, made), carrier.receiver("hidden", spec, made)

    def send(hidden: np.ndarray, mask: np.ndarray) -> Received:
        for end in ends:
            end.state = selector.as_selector(made).init(spec)
        sender, receiver = ends
        found = np.zeros(hidden.shape, np.float32)
        starts = range(0, len(hidden), batch_size)
        before = carrier.sent["hidden"]
        for number, start in enumerate(starts):
            # The last one is filled up with the first rows.
            index = np.arange(start, start + batch_size) % len(hidden)
            arrays = {"hidden": hidden[index], "mask": mask[index]}
            arrays["index"] = index.astype(np.int32)
            sender.send(1, jax.device_put(arrays), number)
            received = receiver.recv(1, number)
            rows = found[start : start + batch_size]
            rows[:] = jax.device_get(received["hidden"])[: len(rows)]
        plain = len(starts) * codec_lib.nbytes(spec["hidden"])
        return Received(found, (carrier.sent["hidden"] - before) / plain)

    return send


def _text(
    rows: attacked_model.Rows, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the chosen rows have text, [n, L] bool, and its pieces, [t]."""
    pieces = rows.pieces[chosen]
    is_text = pieces != attacked_model.NO_PIECE
    return is_text, pieces[is_text]


def baseline(rows: attacked_model.Rows, sides: attacked_model.Sides) -> dict[str, Any]:
    """Returns what an attacker's own text alone gives, and its size.

    Returns:
      most_frequent, unigram: of `leakage.chance`. seen: share of the attacked tokens
      whose piece the attacker's own text has. own_tokens: how many that has.
    """
    _, labels = _text(rows, sides.attacked)
    _, own = _text(rows, sides.own)
    most_frequent, unigram = leakage.chance(own, labels, len(rows.candidates))
    return {
        "most_frequent": most_frequent._asdict(),
        "unigram": unigram,
        "seen": float(np.isin(labels, own).mean()),
        "own_tokens": len(own),
    }


def on_hidden(
    received: np.ndarray,
    rows: attacked_model.Rows,
    tables: attacked_model.Tables,
    attackers: Mapping[int, attacked_model.Sides],
    steps: int,
) -> dict[str, list[dict[str, float]]]:
    """Attacks hidden states, as each attacker.

    Args:
      received: [N, L, D] float32.
      attackers: seed of an inverter -> rows of the attacker that trains it.
      steps: in which an inverter is trained.

    Returns:
      nearest, inversion: of each attacker a `leakage.Recovery` as a dict.
    """
    found: dict[str, list[dict[str, float]]] = {"nearest": [], "inversion": []}
    for seed, sides in attackers.items():
        is_text, labels = _text(rows, sides.attacked)
        is_own_text, own_labels = _text(rows, sides.own)
        attacked = received[sides.attacked]
        near = nearest_by_position(attacked, tables.by_position)
        inverter = leakage.fit_inverter(
            received[sides.own][is_own_text],
            own_labels,
            tables.embeddings,
            jax.random.key(seed),
            steps=steps,
        )
        inverted = leakage.invert(inverter, attacked[is_text], tables.embeddings)
        near, inverted = jax.device_get((near, inverted))
        found["nearest"].append(leakage.recovery(near[is_text], labels)._asdict())
        found["inversion"].append(leakage.recovery(inverted, labels)._asdict())
    return found
