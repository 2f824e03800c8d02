"""The leak meter's record in Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.runtime.records import report

NOTHING = report.NOTHING


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record of `leakage`."""
    return report.join(
        report.heading(result, report.seeds(result)),
        _text(result),
        _codecs(result),
        _span(result),
    )


def _text(result: Mapping[str, Any]) -> str:
    found = result["baseline"]

    def share(*path: str) -> str:
        values = []
        for each in found:
            for name in path:
                each = each[name]
            values.append(each)
        return f"{100 * statistics.fmean(values):.1f} %"

    own = statistics.fmean(each["own_tokens"] for each in found)
    return (
        f"Shares of tokens, in percent. Each seed's attacker attacks"
        f" {result['attacked']} of {result['pairs']:,} sentences; the others, but for"
        f" those that equal one of these, are its own text, {own:,.0f} tokens. It"
        f" chooses among {result['candidates']:,} pieces, those of all these sentences;"
        f" {share('seen')} of the attacked tokens are of pieces that occur in its own"
        f" text. Guesses: the most frequent piece is right for"
        f" {share('most_frequent', 'first')}, one of the five most frequent for"
        f" {share('most_frequent', 'among')}, drawing by frequency for"
        f" {share('unigram')}."
    )


def _codecs(result: Mapping[str, Any]) -> str:
    """Renders codecs in rows, and depths in columns."""
    depths = [each["depth"] for each in result["rows"][0]["depths"]]
    rows = []
    for row in result["rows"]:
        last = row["depths"][-1]
        rows.append(
            [
                row["name"],
                f"`{row['codec']}`",
                f"{last['ratio']:.3f}",
                _spread(row["bleu"], ".2f"),
                *(_share(each["nearest"]) for each in row["depths"]),
                *(_share(each["inversion"]) for each in row["depths"]),
                _share(last["inversion"], "among"),
            ]
        )
    header = [
        *("H^E through", "forward codec", "bytes", "BLEU"),
        *(f"nearest, {depth}" for depth in depths),
        *(f"trained, {depth}" for depth in depths),
        f"among five, {depths[-1]}",
    ]
    alignment = "ll" + "r" * (len(header) - 2)
    return report.join(
        "Tokens recovered from H^E, after so many layers of PLM-S with their trained"
        " adapters:",
        report.table(header, rows, alignment),
    )


def _span(result: Mapping[str, Any]) -> str:
    rows = [
        [
            str(each["rows"]),
            str(each["positions"]),
            _mean(each["inputs"], ".0f"),
            f"{_mean(each['rank'], '.0f')} of {each['width']}",
            _share(each["recall"]),
            _share(each["precision"]),
            _share(each["pieces"]),
        ]
        for each in result["span"]
    ]
    header = [
        *("rows", "positions", "different tokens", "rank", "recovered"),
        *("right of those accepted", "and of their pieces"),
    ]
    return report.join(
        "The tokens of a batch, from the gradient of the first layer's query"
        " projection, as a local step would send it (the span test of DAGER). It"
        " accepts pieces at other positions too, where those in the batch share some:",
        report.table(header, rows, "r" * len(header)),
    )


def _share(values: Sequence[Any], name: str = "first") -> str:
    """Renders shares, or those of that name in several recoveries, in percent."""
    shares = [each[name] if isinstance(each, Mapping) else each for each in values]
    return _spread([100 * share for share in shares], ".1f")


def _mean(values: Sequence[float], form: str) -> str:
    return f"{statistics.fmean(values):{form}}"


def _spread(values: Sequence[float], form: str) -> str:
    """Renders a mean with its standard deviation."""
    if not values:
        return NOTHING
    mean = _mean(values, form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):{form}}"
