"""Fine-tunes an encoder on English pairs and tests it in 15 languages (Table 1).

    python -m experiments.finetune_xnli \\
        --flagfile=experiments/flags/xnli_recipe.flags --data_dir=FOLDER

FOLDER has `nli/{train,dev}.en.tsv.gz` and `nli/test.LANG.tsv.gz`. The parameters that
are tested are selected on English dev alone (--checkpoint_selection). The same command
again resumes where a run was stopped, bit for bit.

    python -m experiments.finetune_xnli --eval_only --run=RUN --data_dir=FOLDER

prints the same table for the pairs of any folder in that format. The loop is in
`xnli/train`.
"""

from experiments import cluster_process, configuration, shared_flags
from experiments.xnli import config, evaluate, train
from nebula_jax.commands import fields
from nebula_jax.runtime.ranks import devices


def main() -> int:
    """Trains and tests, or only tests."""
    command = fields.read(shared_flags.Command)
    is_evaluation = configuration.is_evaluation(command, "finetune_xnli")
    run = config.from_flags()
    config.check(run)
    if is_evaluation:
        devices.simulate(run.local.layout())
        return evaluate.evaluate(run)
    devices.simulate(run.local.layout(), run.local.num_processes or 1)
    settings = configuration.settings(run.agreed)
    return cluster_process.run(run, settings, train.train)


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=config.FLAGS)
