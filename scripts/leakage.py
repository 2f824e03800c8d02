"""Measures the text that whoever receives can recover: a leak meter beside each codec.

    python -m scripts.leakage --data_dir=../shared/data     # a quarter of an hour

Trains the run of Table 5 once, without any line, and attacks what would cross:

- H^E, after none, a third, two thirds and all of PLM-S's layers, through every forward
  codec of Table 5: the nearest public embedding, and a small inverter that the attacker
  trains on text of its own;
- the gradient in H^E, from which a linear probe names pieces of the target sentence;
- the gradient of a first layer, which local steps would send: the span test;
- M3's token ids, which are the text.

The attacks are simple and small, so that every figure is a lower bound. A codec at
which a token is not recovered here does not protect it.
"""

import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import shared_flags
from nebula_jax import errors
from nebula_jax.models import pretrained
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report, run_folder
from scripts.leaks import gradients, hidden, markdown, victim, word_indices
from scripts.leaks.line import Line
from scripts.tables import compression_rows, config
from scripts.tables import runs as table_runs

FLAGFILE = "abnet_table5_tiny"
TABLE5 = config.FOLDER / "results" / "table5_tiny.json"
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


def chosen(
    names: Sequence[str], settings: Mapping[str, str]
) -> list[compression_rows.Row]:
    """Returns the rows of Table 5 of these names; all if there is none.

    Those with a bottleneck are left out, since they have another model, and those with
    late gradients: what crosses is the same.

    Raises:
      errors.SettingsError: at a name that is no row's.
    """
    rows = [
        row
        for row in compression_rows.rows(settings)
        if not row.bottleneck and not row.staleness
    ]
    known = [row.name for row in rows]
    for name in names:
        if name not in known:
            raise errors.SettingsError(
                f"--rows: no {name}; there are {', '.join(known)}"
            )
    return [row for row in rows if not names or row.name in names]


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
    agreed = attacked.run.agreed
    line = functools.cache(
        functools.partial(
            Line,
            batch_size=agreed.batch_size // agreed.micro_batches,
            length=text.ids.shape[1],
            width=model.config.width,
        )
    )

    def lines(names: Sequence[str]) -> dict[str, Line]:
        return {name: line(name) for name in names}

    encode = victim.with_adapters(attacked)
    found = hidden.by_codec(
        *(attacks, encode, text.mask, thirds(layers)),
        *(lines([row.forward for row in rows]), process.message),
    )
    last, alone = encode(layers), victim.without_adapters(model, text)(layers)
    public = []
    for name, each in lines([PLAIN, FEW_BITS]).items():
        received = each.send(last, text.mask).arrays
        own = each.send(alone, text.mask).arrays
        public.append({"codec": name, "depth": layers, **attacks.run(received, own)})
    plm = attacked.both.plms[0].model
    with process.timed(f"the nearest of all {plm.config.vocab_size:,} pieces"):
        of_all = hidden.nearest_of_all(
            text, list(sides.values()), last, victim.every_piece(plm)
        )
    deeper = []
    if whole is not None:
        by_codec = hidden.by_codec(
            *(attacks, victim.without_adapters(whole, text), text.mask),
            *(thirds(whole.config.layers)[1:], lines(DEEPER), process.message),
        )
        deeper = [
            {"codec": name, **each} for name, depths in by_codec.items()
            for each in depths
        ]  # fmt: skip
    backward = dict.fromkeys([PLAIN, *(row.backward for row in rows)])
    backward.pop("pack_tokens", None)  # which loses nothing either
    of_target = victim.rows_of(
        attacked.targets, attacked.both.plms[1].tokenizer.special
    )
    with process.timed("attacking gradients"):
        probes = gradients.probe(
            gradients.features(attacked, last, lines(list(backward))),
            gradients.bags(of_target.pieces, len(of_target.candidates)),
            list(sides.values()),
        )
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
        "all_pieces": {"pieces": plm.config.vocab_size, "nearest": of_all},
        "public": public,
        "deeper": deeper,
        "gradients": probes,
        "span": span,
        "word_indices": word_indices.recovered(
            text, next(iter(sides.values())).attacked
        ),
    }


def main() -> int:
    """Trains what is attacked, attacks it, writes and prints the record."""
    begin = time.monotonic()
    names = flags.FLAGS["rows"].value
    table = config.from_flags("leakage", seeds=SEEDS)
    flagfile = table_runs.flagfile(FLAGFILE)
    settings = table_runs.settings(flagfile)
    rows = chosen(names, settings)
    table5 = json.loads(TABLE5.read_text("utf-8")) if TABLE5.is_file() else {}
    with run_folder.lock(table.workdir):
        with process.timed("training what is attacked"):
            workdir = victim.train(table, flagfile)
        attacked = victim.load(workdir)
        found = gather(
            *(attacked, rows, table5, list(map(int, table.seeds))),
            whole=victim.whole_plm(attacked),
        )
    seconds = time.monotonic() - begin
    about = report.provenance(seconds, seeds=table.seeds)
    result = {**about, "settings": settings, **found}
    table_runs.write(result, markdown.markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=[*config.FLAGS, "rows"])
