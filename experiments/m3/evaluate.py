"""The evaluation of an M3 run that has ended, on the held-out text of any folder.

What its generators sample there, and how well its discriminator finds it, by language.
All of its clusters' checkpoints have to be in the run's folder.

B rows of a micro-batch, L length.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.m3 import config, models, probes, report, whole
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import errors, files
from nebula_jax.data import language_mixture, resumable_batches, tsv
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.evaluation import rtd
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints, run_folder
from nebula_jax.runtime.records import report as run_report
from nebula_jax.training import checkpoint


def evaluate(run: config.Run) -> int:
    """Evaluates what a run trained, on the text of --data_dir; returns the exit status.

    The run has ended, or stopped. Raises errors.NebulaError if a cluster's checkpoint
    is not there, or --data_dir has held-out text in none of the run's languages.
    """
    run = run.with_local(init_from="")  # it has begun
    agreed, vocabulary = run.agreed, shared_vocabulary.given(run.local)
    made = models.load(run, vocabulary)
    step, (discriminator, *generators) = trained(run)
    mesh = devices.mesh(run.local.layout(), agreed.batch_size)
    predict = whole.prediction(made.config, mesh)
    fresh = models.discriminator_init(mesh, made, agreed.seed)
    probe = probes.Probes(run, made, vocabulary, mesh, fresh)
    found: dict[str, dict[str, float]] = {}
    read: list[Any] = []
    for generator, group in zip(generators, agreed.groups(), strict=True):
        for place, language in enumerate(group):
            batches = held_out(run, vocabulary, language)
            # Masks are drawn by the number of a batch, the same as in the run.
            numbers = itertools.count(place * agreed.eval_batches)
            keys = map(text_lib.held_out_rng, numbers)
            predictions = [
                jax.device_get(predict(generator, discriminator, key, batch))
                for key, batch in zip(keys, batches, strict=False)
            ]
            if predictions:
                found[language] = rtd.report(predictions)
                read.append([language, *(batch.tolist() for batch in batches)])
    if not found:
        raise errors.SettingsError(
            f"--data_dir={run.local.data_dir} has no mono/LANG.valid.txt in a language"
            f" of the run: {', '.join(itertools.chain(*agreed.groups()))}"
        )
    out = (
        run.local.workdir
        / run_folder.EVALUATED
        / f"rtd-{files.digest_of([step, *read])}"
    )
    record = {
        "command": run_report.command(),
        "commit": run_report.commit(),
        "text_from": run.local.data_dir,
        "step": step,
        "languages": found,
        "probes": probe.measure(discriminator, []),
    }
    run_report.write(out / "summary.json", record)
    run_report.show(markdown(record))
    process.progress(f"report: {out}")
    return 0


def trained(run: config.Run) -> tuple[int, list[Any]]:
    """Returns the newest step that all clusters have, and their parameters there.

    Raises checkpoint.CheckpointError if there is none.
    """
    names, workdir = config.names(run.agreed), run.local.workdir
    step = checkpoints.newest_in_all(workdir, names)
    folders = [checkpoints.folder_of(workdir, name) for name in names]
    return step, [checkpoint.read(folder, step)["params"] for folder in folders]


def held_out(
    run: config.Run, vocabulary: vocabularies.Vocabulary, language: str
) -> list[np.ndarray]:
    """Returns the held-out batches of a language, [B, L] int32; [] without its text."""
    from nebula_jax.data import packed_text  # here, since it takes long to import

    agreed, local = run.agreed, run.local
    try:
        prepared = packed_text.prepare(
            text_lib.folder(local),
            "mono",
            language,
            ("valid",),
            vocabulary,
            agreed.max_length,
            local.prepared_dir,
        )
    except tsv.NoCorpusError:
        process.message(f"{local.data_dir} has no held-out text in {language}")
        return []
    language_mixture.check_known({language: prepared.splits["valid"]}, process.message)
    return resumable_batches.held_out_batches(
        prepared.splits["valid"],
        agreed.eval_batches,
        agreed.batch_size,
        agreed.max_length,
    )


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the figures of each language, and their means."""
    rows, gaps = record["languages"], record["probes"].get("translation_gap", {})
    cells = [
        [
            language,
            run_report.figure(figures["rtd_auc"], ".3f"),
            *(f"{figures[name]:.1%}" for name in report.FIGURES[1:]),
            run_report.figure(gaps.get(language), ".3f"),
        ]
        for language, figures in rows.items()
    ]
    auc = report.mean(figures["rtd_auc"] for figures in rows.values())
    cells.append([f"mean of {len(rows)}", run_report.figure(auc, ".3f"), *[""] * 5])
    header = ["language", "RTD AUC", "fake tokens", "sampled right", "CLM right"]
    return run_report.join(
        f"Held-out text of {record['text_from']}, after step {record['step']} (an RTD"
        " AUC of 0.5 is a guess):",
        run_report.table([*header, "most frequent", "translation gap"], cells),
    )
