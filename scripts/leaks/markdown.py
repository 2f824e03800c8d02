"""The leak meter's record in Markdown."""

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.runtime.records import report
from scripts.tables import sweep


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record of `leakage`."""
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
