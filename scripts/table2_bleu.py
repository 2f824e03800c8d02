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

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import shared_flags
from nebula_jax import files
from nebula_jax.data import parallel_side, split_parallel, tokenizers
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import packages
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import run_folder
from scripts.tables import abnet as abnet_runs
from scripts.tables import abnet_markdown, config, held_out
from scripts.tables import runs as table_runs

flags.DEFINE_list(
    "pairs",
    ["es-en", "zh-en"],
    "Language pairs of the table: es-en, zh-en or both.",
)

SCRATCH, ABNET, CLOUD = "Transformer, from scratch", "ABNet", "ABNet-Cloud"
MASKED = "ABNet, mask-predict"
METHODS = (SCRATCH, MASKED, ABNET, CLOUD)
# Our choice: twice as long; 3e-3, the adapters' rate, is too much for random layers.
SCRATCH_FLAGS = (
    *("--steps=320", "--eval_every=320"),
    *(
        "--train_all",
        "--learning_rate=1e-3",
        "--warmup_steps=100",
        "--mlm_head_steps=0",
    ),
    *("--plm_dropout=0.1", "--adapter_dropout=0.1"),
)
CLOUD_CODEC = "pack_tokens|int8(64)"


def runs_of(
    method: str, pair: str, seed: str, base: Sequence[str], models: Sequence[str]
) -> table_runs.Run:
    """Describes a run of the table.

    Args:
      method: one of METHODS.
      pair: languages, as in `es-en`.
      seed: of the run.
      base: flags of all runs.
      models: folders of the random models, source and target.
    """
    more = {
        SCRATCH: (
            *("--cluster=whole", *SCRATCH_FLAGS),
            *(f"--source_model={models[0]}", f"--target_model={models[1]}"),
        ),
        MASKED: ("--cluster=whole", "--objective=cmlm", "--beams=4"),
        ABNET: ("--cluster=whole",),
        CLOUD: (
            "--cluster=all",
            f"--forward_codec={CLOUD_CODEC}",
            f"--backward_codec={CLOUD_CODEC}",
        ),
    }[method]
    kind = method.lower().replace(",", "").replace(" ", "_")
    return abnet_runs.run(
        f"{kind}-{pair}-seed{seed}", (*base, f"--pair={pair}", f"--seed={seed}", *more)
    )


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
        model = pretrained.first_layers(
            pretrained.load(whole), int(settings[f"{side}_layers"])
        )
        tokenizers.save(out, tokenizers.trim(tokenizer, keep))
        pretrained.save(out, random_like(pretrained.trim(model, keep)))
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
    runs: table_runs.Runs, chosen: Sequence[tuple[str, str, str, table_runs.Run]]
) -> list[dict[str, Any]]:
    """Gathers the table's rows, of the runs that have ended.

    Args:
      runs: with their figures.
      chosen: (method, pair, seed, run) of each.
    """
    rows: dict[str, dict[str, Any]] = {}
    ended: dict[tuple[str, str], dict[str, Any]] = {}
    for method, pair, seed, run in chosen:
        found = runs.found(run)
        if found is None:
            continue
        ended.setdefault((method, pair), {})[seed] = found
        new = {"method": method, "pairs": {}, "seconds": 0.0}
        row = rows.setdefault(method, new)
        scores = {"pair": pair, "bleu": [], "bleu_dev": []}
        scores = row["pairs"].setdefault(pair, scores)
        scores["bleu"].append(abnet_runs.bleu(found))
        scores["bleu_dev"].append(abnet_runs.bleu(found, "dev"))
        row["seconds"] += found["summary"]["seconds"]
        row["trained_parameters"] = sum(
            each["trained_parameters"] for each in found["summary"]["clusters"]
        )
    by_seed = {key: held_out.by_seed(results) for key, results in ended.items()}
    for method, row in rows.items():
        for pair, scores in row["pairs"].items():
            beside = by_seed.get((ABNET, pair), {})
            scores |= held_out.compare(by_seed[method, pair], beside)
    return [row | {"pairs": list(row["pairs"].values())} for row in rows.values()]


def main() -> int:
    """Does the missing runs; writes and prints the table."""
    pairs = flags.FLAGS["pairs"].value
    table = config.from_flags("table2", ["tiny"], abnet_runs.SEEDS)
    flagfile = table_runs.flagfile(f"abnet_table5_{table.scale}")
    settings = table_runs.settings(flagfile)
    settings = {flag: each for flag, each in settings.items() if flag != "pair"}
    base = table.arguments(flagfile)
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, abnet_runs.figures, results=table.results)
        chosen = []
        for pair in pairs:
            models = random_models(table, pair, settings)
            chosen += [
                (method, pair, seed, runs_of(method, pair, seed, base, models))
                for seed in table.seeds
                for method in METHODS
            ]
        for *_, run in chosen:
            runs.result(run)
        rows = gather(runs, chosen)
    about = runs.provenance(table.seeds)
    result = about | {"rows": rows}
    table_runs.write(result, abnet_markdown.table2(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["scale", *config.FLAGS])
