"""Table 2 at a scale that two cores bear: from scratch, ABNet, ABNet over two clusters.

    python -m scripts.table2_bleu --scale=tiny --data_dir=../shared/data

The Transformer of the first row is the very network of the others, layer by layer, with
random weights in the place of pretrained ones, and all of it trained; its vocabularies
are the pretrained models', trimmed to the training text on both sides. (A vanilla
Transformer has no adapters in its encoder, and one feed-forward part less in a layer of
its decoder.) It reads the same sentences twice as often: it has to learn what the
others were given. ABNet writes from left to right, and in a row of its own by
mask-predict, which ABNet's code has. ABNet-Cloud is two processes that compress what
crosses.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import lifecycle, shared_flags
from nebula_jax import files
from nebula_jax.data import parallel_side, split_parallel, tokenizers
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import packages
from scripts.tables import abnet as abnet_runs
from scripts.tables import runs as table_runs

for key_flag in ("out", "data_dir", "workdir", "pretrained_dir", "prepared_dir"):
    flags.declare_key_flag(key_flag)
flags.adopt_module_key_flags(table_runs)
LANGUAGES = flags.DEFINE_list("pairs", ["es-en"], "Of es-en and zh-en.")

SCRATCH, ABNET, CLOUD = "Transformer, from scratch", "ABNet", "ABNet-Cloud"
MASKED = "ABNet, mask-predict"
METHODS = (SCRATCH, MASKED, ABNET, CLOUD)
# Our choice: twice as long; 3e-3, the adapters' rate, is too much for layers that know
# nothing.
SCRATCH_FLAGS = (
    *("--steps=320", "--bleu_every=320"),
    *("--train_all", "--peak_rate=1e-3", "--rise_steps=100", "--head_steps=0"),
    *("--plm_dropout=0.1", "--adapter_dropout=0.1"),
)
CLOUD_CODEC = "pack_tokens|int8(64)"


def runs_of(
    method: str, pair: str, seed: str, base: Sequence[str], models: Sequence[str]
) -> table_runs.Run:
    """A run of the table.

    Args:
      method: of METHODS.
      pair: languages.
      seed: of the run.
      base: arguments of all.
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
    folder: pathlib.Path, pair: str, settings: Mapping[str, str]
) -> tuple[str, str]:
    """Checkpoint folders of random weights in the shapes of the pretrained models.

    Their vocabularies are cut to the training text, so that their tables can be
    trained.

    Args:
      folder: gets `PAIR-source` and `PAIR-target`.
      pair: languages.
      settings: of the flagfile.
    """
    made_of = [table_runs.data_dir(), sorted(settings.items())]
    text = folder / f"{pair}-text-{files.digest_of(made_of)[:12]}"
    names = settings.get("pair_sources", "")
    limits = [
        int(settings[each]) if each in settings else None
        for each in ("max_pairs", "max_words")
    ]
    texts = split_parallel.split(
        table_runs.data_dir(),
        tuple(pair.split("-")),
        text,
        names.split(",") if names else None,
        *limits,
    )
    made = []
    for side, own_text in zip(("source", "target"), texts, strict=True):
        out = folder / f"{pair}-{side}"
        name = settings[f"{side}_model"]
        whole = packages.prepare(
            name, pathlib.Path(shared_flags.PRETRAINED_DIR.value), lifecycle.say
        )
        words = tokenizers.load(whole)
        train = parallel_side.read(parallel_side.path(own_text, "train")).texts
        keep = tokenizers.kept_ids(
            words, np.flatnonzero(tokenizers.count_pieces(words, train))
        )
        model = pretrained.first_layers(
            pretrained.load(whole), int(settings[f"{side}_layers"])
        )
        tokenizers.save(out, tokenizers.trim(words, keep))
        pretrained.save(out, random_like(pretrained.trim(model, keep)))
        made.append(str(out))
    return made[0], made[1]


def random_like(model: pretrained.Pretrained) -> pretrained.Pretrained:
    """The same shapes as BERT would begin with; another seed is another adapter."""
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
    """The table's rows, of the runs that have ended.

    Args:
      runs: where their figures are.
      chosen: (method, pair, seed, run).
    """
    rows: dict[str, dict[str, Any]] = {}
    for method, pair, _, run in chosen:
        found = runs.found(run)
        if found is None:
            continue
        new = {"method": method, "pairs": {}, "seconds": 0.0, "commits": []}
        row = rows.setdefault(method, new)
        of = row["pairs"].setdefault(pair, {"pair": pair, "bleu": [], "bleu_dev": []})
        of["bleu"].append(abnet_runs.bleu(found))
        of["bleu_dev"].append(abnet_runs.bleu(found, "dev"))
        row["seconds"] += found["summary"]["seconds"]
        row["trained_parameters"] = sum(
            each["trained_parameters"] for each in found["summary"]["clusters"]
        )
        row["commits"].append(found["summary"]["commit"])
    return [row | {"pairs": list(row["pairs"].values())} for row in rows.values()]


def main() -> int:
    """Runs what is missing; writes the figures."""
    scale, seeds = table_runs.scale(["tiny"]), table_runs.seeds(abnet_runs.SEEDS)
    name = f"table2_{scale}"
    flagfile = table_runs.flagfile(f"abnet_table5_{scale}")
    settings = table_runs.settings(flagfile)
    settings = {flag: of for flag, of in settings.items() if flag != "pair"}
    base = table_runs.base_arguments(flagfile)
    folder = pathlib.Path(shared_flags.WORKDIR.value or f"runs/{name}")
    with lifecycle.alone_in(folder):
        runs = table_runs.Runs(folder, abnet_runs.figures)
        chosen = []
        for pair in LANGUAGES.value:
            models = random_models(folder / "random", pair, settings)
            chosen += [
                (method, pair, seed, runs_of(method, pair, seed, base, models))
                for seed in seeds
                for method in METHODS
            ]
        for *_, run in chosen:
            runs.result(run)
        rows = gather(runs, chosen)
    commits = [each for row in rows for each in row["commits"]]
    seconds = sum(row["seconds"] for row in rows)
    result = table_runs.provenance(commits, seconds, seeds) | {"rows": rows}
    table_runs.write(result, name)
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
