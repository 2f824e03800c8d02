"""Measures the text that whoever receives can recover: a leak meter beside each codec.

    python -m scripts.leakage --data_dir=../shared/data     # a quarter of an hour

Trains the run of Table 5 once, without any line, and attacks what would cross:

- H^E, after none, a third, two thirds and all of PLM-S's layers, through every forward
  codec of Table 5: the nearest public embedding, and a small inverter that the attacker
  trains on text of its own;
- the gradient of a first layer, which local steps would send: the span test.

The attacks are simple and small, so that every figure is a lower bound. A codec at
which a token is not recovered here does not protect it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import shared_flags
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report, run_folder
from scripts.leaks import gradients, hidden, markdown, victim
from scripts.leaks.line import Line
from scripts.tables import compression_rows, config
from scripts.tables import runs as table_runs

FLAGFILE = "abnet_table5_tiny"
TABLE5 = config.RESULTS / "table5_tiny.json"
SEEDS = 3


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
) -> dict[str, Any]:
    """Makes all attacks.

    Args:
      attacked: the run.
      rows: of Table 5, whose codecs are attacked.
      table5: its record; {} if there is none.
      seeds: of the attackers.
      sizes: of the attacks.

    Returns:
      The record without its provenance.
    """
    text, model = attacked.rows, attacked.model
    layers = model.config.layers
    sides = {seed: victim.sides(text, seed, sizes.attacked) for seed in seeds}
    tables = victim.tables(model, text)
    attacks = hidden.Attacks(text, tables, sides, sizes.training)
    agreed = attacked.run.agreed
    shape = agreed.batch_size // agreed.micro_batches, *text.ids.shape[1:]
    found = hidden.by_codec(
        attacks,
        victim.with_adapters(attacked),
        text.mask,
        thirds(layers),
        {row.forward: Line(row.forward, *shape, model.config.width) for row in rows},
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
        "span": span,
    }


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
        seeds = list(map(int, table.seeds))
        found = gather(attacked, chosen(settings), table5, seeds)
    about = report.provenance(time.monotonic() - begin, seeds=table.seeds)
    result = {**about, "settings": settings, **found}
    table_runs.write(result, markdown.markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=config.FLAGS)
