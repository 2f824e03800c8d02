"""Reproduces Table 5, Fig. 9 and Fig. 10 on two cores, with more codecs.

    python -m scripts.table5_compression --scale=tiny --data_dir=../shared/data

Runs `train_abnet` once for each row and seed, one after the other; after a stop, the
same command goes on. Quality and speed are measured apart, since a run that waits for a
slow line takes hours: loss and BLEU of held-out pairs with `--cluster=whole`, where the
same codecs stand between the halves and the numbers are the same; seconds and bytes a
step with a short run of two clusters over a line. The first such run measures a step's
computation, from which the rate and delay of that line follow; all others use it.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments import shared_flags
from experiments.abnet import scaled_wan
from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector, wan
from nebula_jax.runtime.records import run_folder
from scripts.tables import abnet as abnet_runs
from scripts.tables import abnet_markdown, compression_rows, config, held_out, pictures
from scripts.tables import runs as table_runs

STAGES = ("quality", "speed", "start")
"""Loss and BLEU; seconds and bytes; Fig. 10."""
FEWER_BYTES = 8.0
FAR_FEWER_BYTES = 25.0
LOSS_APART = 0.01  # nats
OVER_IDEAL = 1.1
IDEALS = {
    "ideal": "max(compute, wire)",
    "with_round_trip": "the same with one round trip in the wire",
}


def quality_run(
    row: compression_rows.Row, seed: str, base: Sequence[str]
) -> table_runs.Run:
    """Describes the run that measures loss and BLEU."""
    return abnet_runs.run(
        f"quality-{compression_rows.file_name(row.name)}-seed{seed}",
        (*base, "--cluster=whole", f"--seed={seed}", *row.flags),
        f"seed{seed}",
    )


def speed_run(
    row: compression_rows.Row,
    line: str,
    settings: Mapping[str, str],
    base: Sequence[str],
) -> table_runs.Run:
    """Describes the run that measures time and bytes."""
    more_steps = 0
    if row.forward.startswith("delta"):
        # In the first epoch nothing has been seen before: all of it crosses in full.
        more_steps = int(settings["max_pairs"]) // int(settings["batch_size"])
    name = f"speed-{compression_rows.file_name(row.name)}"
    return abnet_runs.short_run(name, row.flags, line, base, more_steps)


def formula_ratio(codec: str, settings: Mapping[str, str], width: int) -> float | None:
    """Returns eq. 4's ratio of a codec; None where the values decide the size.

    The lone r of its numerator is left out: our factors contain the singular values.
    """
    made = codecs.from_string(codec).codec
    if isinstance(made, selector.Selector):
        return None
    rows = int(settings["batch_size"]) // int(settings["micro_batches"])
    length = int(settings["length_buckets"].split(",")[-1])
    spec = jax.ShapeDtypeStruct((rows, length, width), jnp.float32)
    return codec_lib.ratio(made, spec)


def ideal_seconds(
    speed: Mapping[str, float], line: Mapping[str, float], round_trips: int = 0
) -> float:
    """Returns max(compute, wire): a step if nothing waited for anything else.

    Args:
      speed: of the row; both directions of the line are busy at once.
      line: from `scaled_wan.read`.
      round_trips: of the line, added to the wire. Every step has one: it ends only
        after its last message has arrived and the answer has come back.

    Returns:
      Seconds.
    """
    up = wan.from_string(line["wan"]).up
    wire = 8 * max(speed["forward"], speed["backward"]) / up.rate
    return max(line["compute_seconds"], wire + round_trips * 2 * up.delay)


def ideals(speed: Mapping[str, float], line: Mapping[str, float]) -> dict[str, float]:
    """Returns the ideal seconds of a step without and with its round trip."""
    return {
        "ideal": ideal_seconds(speed, line),
        "with_round_trip": ideal_seconds(speed, line, round_trips=1),
    }


def gather(
    runs: table_runs.Runs,
    settings: Mapping[str, str],
    base: Sequence[str],
    seeds: Sequence[str],
) -> dict[str, Any]:
    """Gathers the figures of the runs that have ended."""
    table, line = [], {}
    width = padded = None
    baseline: held_out.BySeed | None = None

    def quality(row: compression_rows.Row) -> dict[str, Any]:
        nonlocal baseline
        found = {seed: runs.found(quality_run(row, seed, base)) for seed in seeds}
        found = {seed: result for seed, result in found.items() if result is not None}
        scores = held_out.by_seed(found)
        baseline = scores if baseline is None else baseline  # of the first row
        return _quality(list(found.values())) | held_out.compare(scores, baseline)

    for row in compression_rows.rows(settings):
        found = dict(row._asdict())
        over = line.get("wan", scaled_wan.AUTO)
        speed = runs.found(speed_run(row, over, settings, base))
        if speed is not None:
            line = line or speed["summary"]["line"]
            padded = speed["summary"]["bytes"]["padded"]
            width = [each for each in speed["summary"]["clusters"] if "width" in each]
            found["speed"] = abnet_runs.speed_of(speed)
            found["speed"] |= ideals(found["speed"], line)
            found["formula"] = [
                formula_ratio(codec, settings, width[0]["width"])
                for codec in (row.forward, row.backward)
            ]
        found |= quality(row)
        if found.keys() != row._asdict().keys():
            table.append(found)
    starts = []
    for row in compression_rows.rows(settings):
        if row.name == compression_rows.START_ROW:
            for step in compression_rows.start_steps(settings):
                found = quality(compression_rows.late(row, step))
                starts += [{"step": step, **found}] if found else []
    return {
        **runs.provenance(seeds),
        "settings": dict(settings),
        "padded_bytes": padded,
        "line": line,
        "rows": table,
        "starts": starts,
        "targets": targets(table, padded),
    }


def _quality(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gathers BLEU on dev and test, training losses and bytes of a row."""
    if not results:
        return {}
    sent = results[0]["summary"]["clusters"][0].get("sent", {})
    steps = results[0]["summary"]["clusters"][0]["last_step"]
    return {
        "bleu": [abnet_runs.bleu(result) for result in results],
        "bleu_dev": [abnet_runs.bleu(result, "dev") for result in results],
        "losses": [result["losses"] for result in results],
        "bytes_all_steps": {
            way: sum(size for name, size in sent.items() if name.startswith(channel))
            / steps
            for way, channel in (("forward", "hidden["), ("backward", "gradient["))
        },
    }


def targets(table: Sequence[Mapping[str, Any]], padded: float | None) -> list[dict]:
    """Compares what was measured with the targets."""
    found = []
    rated = [row for row in table if "speed" in row]
    scored = [row for row in rated if "bleu" in row]
    names = [row["name"] for row in scored]
    if "baseline" in names and padded:
        bleus = dict(zip(names, held_out.bleus(scored), strict=True))
        noise = pooled_deviation(list(bleus.values()))
        small = {
            row["name"]: _bleu_lost(row["name"], scored, bleus)
            for row in scored
            if max(abnet_runs.step_bytes(row).values()) <= padded / FEWER_BYTES
        }
        if small:
            best = min(small, key=small.__getitem__)
            lost = small[best]
            found.append(
                {
                    "what": f"BLEU lost with {FEWER_BYTES:g} times fewer bytes both"
                    f" ways ({best}), beside one standard deviation of seeds",
                    "value": lost,
                    "at_most": noise,
                    "met": lost <= noise,
                }
            )
        found += _of_far_fewer(scored, padded)
    for ideal, name in IDEALS.items() if rated else ():
        worst = max(
            rated, key=lambda row: row["speed"]["seconds"] / row["speed"][ideal]
        )
        over = worst["speed"]["seconds"] / worst["speed"][ideal]
        found.append(
            {
                "what": f"s/step over {name}, at worst ({worst['name']})",
                "value": over,
                "at_most": OVER_IDEAL,
                "met": over <= OVER_IDEAL,
            }
        )
    plain = next((row for row in rated if row["name"] == "baseline"), None)
    if plain is not None and len(rated) > 1:
        slowest = max(
            (row for row in rated if row is not plain),
            key=lambda row: row["speed"]["seconds"],
        )
        share = slowest["speed"]["seconds"] / plain["speed"]["seconds"]
        found.append(
            {
                "what": f"s/step over sending plain, slowest codec ({slowest['name']})",
                "value": share,
                "at_most": 1.0,
                "met": share <= 1.0,
            }
        )
    return found


def _bleu_lost(
    name: str,
    scored: Sequence[Mapping[str, Any]],
    bleus: Mapping[str, Sequence[float]],
) -> float:
    """Returns how much lower a row's BLEU is than the baseline's.

    On held-out pairs it is that of the seeds that both have: not all rows have as many,
    and seeds are further apart than rows.

    Args:
      name: of the row.
      scored: rows of the record.
      bleus: row -> BLEU by seed, from `held_out.bleus`.
    """
    rows = {row["name"]: row.get("held_out", {}) for row in scored}
    if all(rows.values()) and "bleu_difference" in rows[name]:
        return -rows[name]["bleu_difference"]["difference"]
    return statistics.fmean(bleus["baseline"]) - statistics.fmean(bleus[name])


def _of_far_fewer(
    scored: Sequence[Mapping[str, Any]], padded: float
) -> list[dict[str, Any]]:
    """Compares the quality of a row that sends far fewer bytes.

    It is the one that loses the least BLEU beyond its interval; of several, with the
    lowest loss.
    """
    small = [
        row
        for row in scored
        if max(abnet_runs.step_bytes(row).values()) <= padded / FAR_FEWER_BYTES
        and row.get("held_out", {}).get("difference")
    ]
    if not small:
        return []

    def lost(row: Mapping[str, Any]) -> tuple[float, float]:
        apart = statistics.fmean(row["held_out"]["difference"].values())
        return max(0.0, -row["held_out"]["bleu_difference"]["high"]), apart

    best = min(small, key=lost)
    bleu, apart = lost(best)
    about = f"with {FAR_FEWER_BYTES:g} times fewer bytes both ways ({best['name']})"
    return [
        {
            "what": f"held-out loss above the baseline's {about}, nats",
            "value": apart,
            "at_most": LOSS_APART,
            "met": apart <= LOSS_APART,
        },
        {
            "what": f"BLEU beyond its interval below the baseline's {about}",
            "value": bleu,
            "at_most": 0.0,
            "met": bleu <= 0.0,
        },
    ]


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Returns the standard deviation of runs about the mean of their row."""
    squares = sum(
        (value - statistics.fmean(group)) ** 2 for group in groups for value in group
    )
    return (squares / max(1, sum(len(group) - 1 for group in groups))) ** 0.5


def work(
    runs: table_runs.Runs,
    settings: Mapping[str, str],
    base: Sequence[str],
    seeds: Sequence[str],
    stages: Sequence[str],
    names: Sequence[str],
) -> None:
    """Does the runs that have not been done."""
    chosen = [
        row for row in compression_rows.rows(settings) if not names or row.name in names
    ]
    if "speed" in stages:
        plain = compression_rows.rows(settings)[0]
        first = runs.result(speed_run(plain, scaled_wan.AUTO, settings, base))
        line = first["summary"]["line"]["wan"]
        for row in chosen:
            if row.name != plain.name:
                runs.result(speed_run(row, line, settings, base))
    for seed in seeds:
        if "quality" in stages:
            for row in chosen:
                runs.result(quality_run(row, seed, base))
        if "start" in stages:
            for row in chosen:
                if row.name == compression_rows.START_ROW:
                    for step in compression_rows.start_steps(settings):
                        after = compression_rows.late(row, step)
                        runs.result(quality_run(after, seed, base))


def main() -> int:
    """Does the missing runs; writes the table and its figures, and prints it."""
    names, stages = flags.FLAGS["rows"].value, config.chosen("stages", STAGES)
    table = config.from_flags("table5", ["tiny"], abnet_runs.SEEDS)
    flagfile = table_runs.flagfile(f"abnet_{table.name}")
    settings = table_runs.settings(flagfile)
    known = [row.name for row in compression_rows.rows(settings)]
    for given in names:
        if given not in known:
            raise errors.SettingsError(
                f"--rows: no {given}; there are {', '.join(known)}"
            )
    base = table.arguments(flagfile)
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, abnet_runs.figures, results=table.results)
        work(runs, settings, base, table.seeds, stages, names)
        result = gather(runs, settings, base, table.seeds)
    table_runs.write(result, abnet_markdown.table5(result), table.out)
    pictures.draw(result, table.out.parent, table.out.stem)
    return 0


if __name__ == "__main__":
    names = ["scale", "rows", "stages", *config.FLAGS]
    shared_flags.run(main, names=names)
