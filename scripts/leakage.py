"""Measures the text that whoever receives can recover: a leak meter beside each codec.

    python -m scripts.leakage --data_dir=../shared/data     # a quarter of an hour

Trains the run of Table 5 once, without any line, and attacks what would cross: H^E,
after none, a third, two thirds and all of PLM-S's layers, through every forward codec
of Table 5, by the nearest public embedding, and by a small inverter that the attacker
trains on text of its own.

The attacks are simple and small, so that every figure is a lower bound. A codec at
which a token is not recovered here does not protect it.
"""

import functools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import shared_flags
from nebula_jax.evaluation import leakage
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report, run_folder
from scripts.leaks import attacked_model, attacks
from scripts.tables import compression_rows, config, sweep
from scripts.tables import runs as table_runs

FLAGFILE = "abnet_table5_tiny"
TABLE5 = config.RESULTS / "table5_tiny.json"
ATTACKED = 400  # sentences, of each attacker


def chosen() -> list[compression_rows.Row]:
    """Returns the rows of Table 5 whose codecs are attacked.

    Those with a bottleneck are left out, since they have another model.
    """
    return [row for row in compression_rows.rows() if not row.bottleneck]


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
            return each["bleu"]
    return []


def gather(
    found: attacked_model.AttackedModel,
    rows: Sequence[compression_rows.Row],
    table5: Mapping[str, Any],
    seeds: Sequence[int],
    attacked: int = ATTACKED,
    steps: int = leakage.STEPS,
) -> dict[str, Any]:
    """Makes all attacks.

    Args:
      rows: of Table 5, whose codecs are attacked.
      table5: its record; {} if there is none.
      attacked: sentences that each attacks.

    Returns:
      The record without its provenance.
    """
    text, model, agreed = found.rows, found.model, found.run.agreed
    sides = {seed: attacked_model.sides(text, seed, attacked) for seed in seeds}
    tables = attacked_model.tables(model, text)
    shape = agreed.batch_size // agreed.micro_batches, *text.ids.shape[1:]
    lines = [attacks.line(row.forward, *shape, model.config.width) for row in rows]
    table: list[dict[str, Any]] = [
        {
            "name": row.name,
            "codec": row.forward,
            "bleu": bleu(table5, row),
            "depths": [],
        }
        for row in rows
    ]
    for depth in thirds(model.config.layers):
        hidden = attacked_model.encoded(found, depth)
        for row, send in zip(table, lines, strict=True):
            received = send(hidden, text.mask)
            figures = attacks.on_hidden(received.arrays, text, tables, sides, steps)
            row["depths"].append({"depth": depth, "ratio": received.ratio, **figures})
            process.message(f"{row['codec']}, cut after {depth} layers")
    return {
        "pairs": len(text.ids),
        "attacked": attacked,
        "candidates": len(text.candidates),
        "training": {"steps": steps, "batch": leakage.BATCH},
        "layers": model.config.layers,
        "baseline": [attacks.baseline(text, each) for each in sides.values()],
        "rows": table,
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    depths = [each["depth"] for each in result["rows"][0]["depths"]]

    def at(place: int, attack: str, name: str, row: Mapping[str, Any]) -> str:
        shares = [each[name] for each in row["depths"][place][attack]]
        return sweep.spread([100 * share for share in shares], ".1f")

    codecs = [
        sweep.Column("H^E through", "name"),
        sweep.Column("forward codec", lambda row: f"`{row['codec']}`"),
        sweep.Column("bytes", lambda row: row["depths"][-1]["ratio"], ".3f"),
        sweep.Column(
            "BLEU", lambda row: sweep.spread(row["bleu"], ".2f") or report.NOTHING
        ),
        *(
            sweep.Column(
                f"{title}, {depth}", functools.partial(at, place, attack, "first")
            )
            for title, attack in (("nearest", "nearest"), ("trained", "inversion"))
            for place, depth in enumerate(depths)
        ),
        sweep.Column(
            f"among five, {depths[-1]}", functools.partial(at, -1, "inversion", "among")
        ),
    ]
    return report.join(
        report.heading(result, report.seeds(result)),
        _text(result),
        "Tokens recovered from H^E, after so many layers of PLM-S with their trained"
        " adapters:",
        sweep.table(codecs, result["rows"], "ll" + "r" * (len(codecs) - 2)),
    )


def _text(result: Mapping[str, Any]) -> str:
    found = result["baseline"]
    frequent = [each["most_frequent"] for each in found]

    def share(values: Sequence[float]) -> str:
        return f"{100 * statistics.fmean(values):.1f} %"

    own = statistics.fmean(each["own_tokens"] for each in found)
    return (
        f"Shares of tokens, in percent. Each seed's attacker attacks"
        f" {result['attacked']} of {result['pairs']:,} sentences; the others, but for"
        f" those that equal one of these, are its own text, {own:,.0f} tokens. It"
        f" chooses among {result['candidates']:,} pieces, those of all these sentences;"
        f" {share([each['seen'] for each in found])} of the attacked tokens are of"
        " pieces that occur in its own text. Guesses: the most frequent piece is right"
        f" for {share([each['first'] for each in frequent])}, one of the five most"
        f" frequent for {share([each['among'] for each in frequent])}, drawing by"
        f" frequency for {share([each['unigram'] for each in found])}."
    )


def main() -> int:
    """Trains what is attacked, attacks it, writes and prints the record."""
    begin = time.monotonic()
    table = config.from_flags("leakage", seeds=3)
    flagfile = table_runs.flagfile(FLAGFILE)
    settings = table_runs.settings(flagfile)
    table5 = json.loads(TABLE5.read_text("utf-8")) if TABLE5.is_file() else {}
    with run_folder.lock(table.workdir):
        with process.timed("training what is attacked"):
            workdir = attacked_model.train(table, flagfile)
        seeds = list(map(int, table.seeds))
        found = gather(attacked_model.load(workdir), chosen(), table5, seeds)
    about = report.provenance(time.monotonic() - begin, seeds=table.seeds)
    result = {**about, "settings": settings, **found}
    table_runs.write(result, markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=config.FLAGS)
