"""Measures the text that whoever receives can recover: a leak meter beside each codec.

    python -m scripts.leakage --data_dir=../shared/data     # a quarter of an hour

Trains the run of Table 5 once, without any line, and attacks what would cross:

- H^E, after none, a third, two thirds and all of PLM-S's layers, through every forward
  codec of Table 5: the nearest public embedding, and a small inverter that the attacker
  trains on text of its own; also without the adapters, and deeper in PLM-S;
- the gradient of a first layer, which local steps would send: the span test.

The attacks are simple and small, so that every figure is a lower bound. A codec at
which a token is not recovered here does not protect it.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import shared_flags
from nebula_jax.models import pretrained
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report, run_folder
from scripts.leaks import gradients, hidden, markdown, victim
from scripts.leaks.line import Line
from scripts.tables import compression_rows, config
from scripts.tables import runs as table_runs

FLAGFILE = "abnet_table5_tiny"
TABLE5 = config.RESULTS / "table5_tiny.json"
SEEDS = 3
PLAIN, FEW_BITS = "identity", "pack_tokens|hadamard|int4(64)"
DEEPER = (PLAIN, "svd(0.6)|fp16", "svd(0.2)|fp16")
"""The codecs that are attacked in the deeper layers of PLM-S too."""


class Sizes(NamedTuple):
    """The sizes of the attacks.

    attacked: sentences that each attacker attacks.
    training: of an inverter.
    batches: rows of the batches that the span test is applied to.
    """

    attacked: int = 400
    training: hidden.Training = hidden.Training()
    batches: tuple[int, ...] = (1, 8, 16, 32, 64, 96, 128)


SIZES = Sizes()


def chosen(settings: Mapping[str, str]) -> list[compression_rows.Row]:
    """Returns the rows of Table 5 whose codecs are attacked.

    Those with a bottleneck are left out, since they have another model.
    """
    return [row for row in compression_rows.rows(settings) if not row.bottleneck]


def thirds(layers: int) -> list[int]:
    """Returns none, a third, two thirds and all of so many layers.

    >>> thirds(12), thirds(2)
    ([0, 4, 8, 12], [0, 1, 2])
    """
    return sorted({round(layers * part / 3) for part in range(4)})


def bleu(record: Mapping[str, Any], row: compression_rows.Row) -> list[float]:
    """Returns the BLEU that Table 5's record has of a row, for each of its seeds."""
    for each in record.get("rows", ()):
        if (each["name"], each["forward"]) == (row.name, row.forward):
            return each.get("bleu", [])
    return []


def gather(
    attacked: victim.Victim,
    rows: Sequence[compression_rows.Row],
    table5: Mapping[str, Any],
    seeds: Sequence[int],
    sizes: Sizes = SIZES,
    whole: pretrained.Pretrained | None = None,
) -> dict[str, Any]:
    """Makes all attacks.

    Args:
      attacked: the run.
      rows: of Table 5, whose codecs are attacked.
      table5: its record; {} if there is none.
      seeds: of the attackers.
      sizes: of the attacks.
      whole: PLM-S with all of its layers; None leaves out what is deeper than the run.

    Returns:
      The record without its provenance.
    """
    text, model = attacked.rows, attacked.model
    layers = model.config.layers
    sides = {seed: victim.sides(text, seed, sizes.attacked) for seed in seeds}
    tables = victim.tables(model, text)
    attacks = hidden.Attacks(text, tables, sides, sizes.training)
    line = _lines(attacked)
    encode = victim.with_adapters(attacked)
    found = hidden.by_codec(
        attacks,
        encode,
        text.mask,
        thirds(layers),
        {row.forward: line(row.forward) for row in rows},
        process.message,
    )
    with process.timed("attacking gradients"):
        span = gradients.span(model, text, tables, sizes.batches, sides)
    return {
        "pairs": len(text.ids),
        "attacked": sizes.attacked,
        "candidates": len(text.candidates),
        "training": sizes.training._asdict(),
        "layers": layers,
        "all_layers": whole.config.layers if whole is not None else layers,
        "baseline": [hidden.baseline(text, each) for each in sides.values()],
        "rows": [
            {
                "name": row.name,
                "codec": row.forward,
                "bleu": bleu(table5, row),
                "depths": found[row.forward],
            }
            for row in rows
        ],
        "public": without_the_adapters(attacked, attacks, encode(layers), line),
        "deeper": deeper(text, attacks, line, whole) if whole is not None else [],
        "span": span,
    }


def _lines(attacked: victim.Victim) -> Callable[[str], Line]:
    """Returns codec -> its channel, each made once."""
    agreed = attacked.run.agreed
    return functools.cache(
        functools.partial(
            Line,
            batch_size=agreed.batch_size // agreed.micro_batches,
            length=attacked.rows.ids.shape[1],
            width=attacked.model.config.width,
        )
    )


def without_the_adapters(
    attacked: victim.Victim,
    attacks: hidden.Attacks,
    sent: np.ndarray,
    line: Callable[[str], Line],
) -> list[dict[str, Any]]:
    """Attacks H^E, [N, L, D], by inverters trained on PLM-S alone, which is public."""
    text, layers = attacked.rows, attacked.model.config.layers
    alone = victim.without_adapters(attacked.model, text)(layers)
    found = []
    for name in (PLAIN, FEW_BITS):
        received, own = (
            line(name).send(each, text.mask).arrays for each in (sent, alone)
        )
        found.append({"codec": name, "depth": layers, **attacks.run(received, own)})
    return found


def deeper(
    text: victim.Rows,
    attacks: hidden.Attacks,
    line: Callable[[str], Line],
    whole: pretrained.Pretrained,
) -> list[dict[str, Any]]:
    """Attacks what would cross of PLM-S if it were cut after more layers."""
    by_codec = hidden.by_codec(
        attacks,
        victim.without_adapters(whole, text),
        text.mask,
        thirds(whole.config.layers)[1:],
        {name: line(name) for name in DEEPER},
        process.message,
    )
    return [
        {"codec": name, **each} for name, depths in by_codec.items() for each in depths
    ]


def main() -> int:
    """Trains what is attacked, attacks it, writes and prints the record."""
    begin = time.monotonic()
    table = config.from_flags("leakage", seeds=SEEDS)
    flagfile = table_runs.flagfile(FLAGFILE)
    settings = table_runs.settings(flagfile)
    table5 = json.loads(TABLE5.read_text("utf-8")) if TABLE5.is_file() else {}
    with run_folder.lock(table.workdir):
        with process.timed("training what is attacked"):
            workdir = victim.train(table, flagfile)
        attacked = victim.load(workdir)
        seeds, whole = list(map(int, table.seeds)), victim.whole_plm(attacked)
        found = gather(attacked, chosen(settings), table5, seeds, whole=whole)
    about = report.provenance(time.monotonic() - begin, seeds=table.seeds)
    result = {**about, "settings": settings, **found}
    table_runs.write(result, markdown.markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=config.FLAGS)
