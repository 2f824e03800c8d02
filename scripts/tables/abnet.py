"""Runs of train_abnet for Tables 2 and 5: their flags and figures."""

import itertools
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.abnet import evaluation
from nebula_jax.runtime.records import report
from nebula_jax.training import metrics
from scripts.tables import config
from scripts.tables import runs as table_runs

MODULE = "experiments.train_abnet"
QUICK = "quick"
CUTS: dict[str, tuple[str, ...]] = {  # scale -> flags that replace the flagfile's
    "tiny": (),
    QUICK: (
        *("--steps=32", "--eval_every=32", "--warmup_steps=8", "--mlm_head_steps=20"),
        *("--max_pairs=1024", "--held_out_pairs=200", "--bleu_sentences=50"),
        *("--batch_size=32", "--micro_batches=4", "--max_in_flight=4"),
    ),
}
SHORT_STEPS = 16  # of a run that is timed over a line
TIMED_STEPS = 10  # the last of them; in the first ones programs are compiled
RECORDED = ("step", "time", "bytes_sent", "bytes_received")


def base_of(table: config.Table) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the settings, and the flags, that all runs of a table begin with."""
    flagfile, cuts = table_runs.flagfile("abnet_table5_tiny"), CUTS[table.scale]
    changed = dict(cut.removeprefix("--").split("=", 1) for cut in cuts)
    settings = table_runs.settings(flagfile) | changed
    return settings, (*table.arguments(flagfile), *cuts)


def speed_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the median seconds and mean bytes of a short run's last steps."""
    last = result["records"][-TIMED_STEPS - 1 :]
    times = [record["time"] for record in last]
    steps = last[-1]["step"] - last[0]["step"]
    return {
        "seconds": statistics.median(b - a for a, b in itertools.pairwise(times)),
        "forward": (last[-1]["bytes_sent"] - last[0]["bytes_sent"]) / steps,
        "backward": (last[-1]["bytes_received"] - last[0]["bytes_received"]) / steps,
    }


def step_bytes(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the bytes of a step of a row of Table 5, by direction, mean of the run.

    A run in one process sends nothing without a codec: then those of the timed steps.
    """
    whole = row.get("bytes_all_steps", {})
    return {way: whole.get(way) or row["speed"][way] for way in ("forward", "backward")}


def figures(run: table_runs.Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads the figures of a finished run.

    `losses` are [[step, loss]] of the cluster that has the translation loss; `records`
    the metrics of the source cluster, if there is one, else of the same; `held_out` the
    file of the scores of held-out sentences, which has no text, or None.
    """
    summary = report.read_summary(workdir)
    if run.module != MODULE:
        return {"summary": summary}
    names = [each["cluster"] for each in summary["clusters"]]
    translating = metrics.read(workdir / ("target" if "target" in names else names[0]))
    sending = metrics.read(workdir / ("source" if "source" in names else names[0]))
    # A source that predicts no lengths has no loss; each step has its bytes.
    steps = [record for record in sending if "bytes_sent" in record]
    return {
        "summary": {
            name: value for name, value in summary.items() if name != "examples"
        },
        "losses": [
            [each["step"], each["loss"]] for each in translating if "loss" in each
        ],
        "records": [
            {name: each[name] for name in RECORDED if name in each} for each in steps
        ],
        "held_out": _held_out(workdir, summary.get("held_out", {})),
    }


def _held_out(workdir: pathlib.Path, found: Mapping[str, float]) -> str | None:
    if not found:
        return None
    folder = workdir / "target" / "translations"
    return evaluation.scores_path(folder, int(found["step"])).read_text("utf-8")


def bleus(results: Iterable[Mapping[str, Any]]) -> list[float]:
    """Returns each run's last BLEU on test pairs."""
    return [
        [each["test"] for each in result["summary"]["bleu"] if "test" in each][-1]
        for result in results
    ]
