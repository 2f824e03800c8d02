"""Reproduces Table 2 on two cores: from scratch, ABNet, ABNet over two clusters.

    python -m scripts.table2_bleu --scale=tiny --data_dir=../shared/data

The Transformer of the first row is the network of the others, layer by layer, with
random instead of pretrained weights, and all of it is trained. Its vocabularies are
those of the pretrained models, trimmed to the training text on both sides. (A vanilla
Transformer has no adapters in its encoder, and one feed-forward part less in a layer of
its decoder.) It reads the same sentences twice as often, since it begins without
pretraining. ABNet decodes from left to right, and in another row by mask-predict, as
ABNet's code does. ABNet-Cloud is two processes that compress what crosses.

Both pairs have the same flags. Chinese has no spaces, so --max_words limits its English
side alone; of six English words that is enough.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import shared_flags
from nebula_jax import files
from nebula_jax.data import parallel_side, split_parallel, tokenizers
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import packages, trimming
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from scripts.tables import abnet as abnet_runs
from scripts.tables import config, held_out, sweep
from scripts.tables import runs as table_runs

PAIRS = ("es-en", "zh-en")
SCRATCH, ABNET, CLOUD = "Transformer, from scratch", "ABNet", "ABNet-Cloud"
MASKED = "ABNet, mask-predict"
# Our choice: twice as long; 3e-3, the adapters' rate, is too much for random layers.
SCRATCH_FLAGS = (
    *("--steps=320", "--eval_every=320", "--train_all", "--learning_rate=1e-3"),
    *("--warmup_steps=100", "--mlm_head_steps=0", "--plm_dropout=0.1"),
    "--adapter_dropout=0.1",
)
CLOUD_CODEC = "pack_tokens|int8(64)"
FLAGS = {
    SCRATCH: ("--cluster=whole", *SCRATCH_FLAGS),
    MASKED: ("--cluster=whole", "--objective=cmlm", "--beams=4"),
    ABNET: ("--cluster=whole",),
    CLOUD: (
        "--cluster=all",
        f"--forward_codec={CLOUD_CODEC}",
        f"--backward_codec={CLOUD_CODEC}",
    ),
}
"""Method -> its flags, in the table's order; of SCRATCH also the random models'."""
MASKED_LOSS = (
    "Mask-predict's loss is of masked pieces, from the others on both sides of them; so"
    " it is not compared with that of pieces from those before."
)


def run_of(
    method: str, pair: str, base: Sequence[str], models: Sequence[str], seed: str
) -> table_runs.Run:
    """Describes a run of the table.

    Args:
      method: a key of FLAGS.
      pair: languages, as in `es-en`.
      base: flags of all runs.
      models: folders of the random models, source and target.
      seed: of the run.
    """
    own = [f"--pair={pair}", f"--seed={seed}", *FLAGS[method]]
    if method == SCRATCH:
        own += [f"--source_model={models[0]}", f"--target_model={models[1]}"]
    kind = method.lower().replace(",", "").replace(" ", "_")
    return abnet_runs.run(f"{kind}-{pair}-seed{seed}", (*base, *own))


def random_models(
    table: config.Table, pair: str, settings: Mapping[str, str]
) -> tuple[str, str]:
    """Writes models of random weights in the shapes of the pretrained ones.

    Their vocabularies are cut to the training text, so that their tables can be
    trained.

    Args:
      table: its folder gets `random/PAIR-source` and `random/PAIR-target`.
      pair: languages, as in `es-en`.
      settings: of the flagfile.

    Returns:
      The two checkpoint folders.
    """
    folder = table.workdir / "random"
    made_of = [table.data_dir, sorted(settings.items())]
    text = folder / f"{pair}-text-{files.digest_of(made_of)[:12]}"
    names = settings.get("corpora", "")
    limits = {
        each: int(settings[each])
        for each in ("max_pairs", "max_words")
        if each in settings
    }
    texts = split_parallel.split(
        table.data_dir,
        tuple(pair.split("-")),
        text,
        names.split(",") if names else None,
        **limits,
        held_out=int(settings.get("held_out_pairs", 0)),
    )
    made = []
    for side, side_text in zip(("source", "target"), texts, strict=True):
        out = folder / f"{pair}-{side}"
        name = settings[f"{side}_model"]
        whole = packages.prepare(
            name, pathlib.Path(table.pretrained_dir), process.message
        )
        tokenizer = tokenizers.load(whole)
        train = parallel_side.read(parallel_side.path(side_text, "train")).texts
        keep = tokenizers.kept_ids(
            tokenizer, np.flatnonzero(tokenizers.count_pieces(tokenizer, train))
        )
        model = trimming.first_layers(
            pretrained.load(whole), int(settings[f"{side}_layers"])
        )
        tokenizers.save(out, tokenizers.trim(tokenizer, keep))
        pretrained.save(out, random_like(trimming.trim(model, keep)))
        made.append(str(out))
    return made[0], made[1]


def random_like(model: pretrained.Pretrained) -> pretrained.Pretrained:
    """Replaces a model's weights by those that BERT would begin with.

    They are the same for every seed of a run, whose adapters differ.
    """
    config, key = model.config, jax.random.key(0)
    ids = jnp.zeros((1, 1), jnp.int32)
    embeddings = transformer.Embeddings(config).init(key, ids, True)["params"]
    hidden = jnp.zeros((1, 1, config.width))
    encoder = transformer.Encoder(config).init(
        jax.random.fold_in(key, 1), hidden, ids == 0, True
    )["params"]
    params = jax.device_get({"embeddings": embeddings, "encoder": encoder})
    return model._replace(params=params)


def gather(
    runs: table_runs.Runs,
    run: Callable[[str, str, str], table_runs.Run],
    pairs: Sequence[str],
    seeds: Sequence[str],
) -> list[dict[str, Any]]:
    """Gathers the table's rows; does the runs that have not been done.

    Args:
      runs: with their figures.
      run: (method, pair, seed) -> the run.
      pairs: of the table.
      seeds: of each row.
    """
    done = {
        (method, pair): runs.of_seeds(functools.partial(run, method, pair), seeds)
        for method in FLAGS
        for pair in pairs
    }
    scores = {key: held_out.by_seed(found) for key, found in done.items()}
    rows = []
    for method in FLAGS:
        results = [each for pair in pairs for each in done[method, pair].values()]
        rows.append(
            {
                "method": method,
                "pairs": [
                    {
                        "pair": pair,
                        **abnet_runs.bleus(done[method, pair].values()),
                        **held_out.compare(scores[method, pair], scores[ABNET, pair]),
                    }
                    for pair in pairs
                ],
                "seconds": sum(each["summary"]["seconds"] for each in results),
                "trained_parameters": sum(
                    each["trained_parameters"]
                    for each in results[-1]["summary"]["clusters"]
                ),
            }
        )
    return rows


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    flagfile = table_runs.flagfile(f"abnet_table5_{table.scale}")
    settings = table_runs.settings(flagfile)
    settings = {flag: each for flag, each in settings.items() if flag != "pair"}
    base = table.arguments(flagfile)
    models = {pair: random_models(table, pair, settings) for pair in PAIRS}

    def run(method: str, pair: str, seed: str) -> table_runs.Run:
        return run_of(method, pair, base, models[pair], seed)

    return {"rows": gather(runs, run, PAIRS, table.seeds)}


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record under the paper's rows."""
    known = sweep.PAPER["table2"]
    ours = [each for row in record["rows"] for each in row["pairs"]]

    def cell(pair: str, column: sweep.Column, row: Mapping[str, Any]) -> str:
        if "pairs" in row:
            found = (each for each in row["pairs"] if each["pair"] == pair)
            return column.cell(next(found, {}))
        # Of the paper there is BLEU alone, and not of all pairs.
        return report.figure(row[pair] or None, ".2f") if column.name == "BLEU" else ""

    def ours_alone(render: Callable[[Mapping[str, Any]], str]) -> Any:
        return lambda row: render(row) if "pairs" in row else ""

    columns = [
        sweep.Column(
            "method", lambda row: "paper: " * ("pairs" not in row) + row["method"]
        ),
        *(
            sweep.Column(f"{pair}: {each.name}", functools.partial(cell, pair, each))
            for pair in known["pairs"]
            for each in held_out.COLUMNS
        ),
        sweep.Column(
            "trained parameters",
            ours_alone(lambda row: f"{row['trained_parameters'] / 1e6:.1f} million"),
        ),
        sweep.Column("minutes", ours_alone(lambda row: f"{row['seconds'] / 60:.1f}")),
    ]
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        held_out.explanation(ours, "ABNet"),
        sweep.table(columns, [*known["rows"], *record["rows"]]),
        MASKED_LOSS,
    )


SWEEP = sweep.Sweep(
    "table2",
    record,
    markdown,
    figures=abnet_runs.figures,
    scales=["tiny"],
    seeds=abnet_runs.SEEDS,
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", *config.FLAGS])
