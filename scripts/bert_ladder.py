"""BERT's pre-training, made faster flag by flag; then over processes; then its cost.

    python -m scripts.bert_ladder                            # minutes, on two cores
    python -m scripts.bert_ladder --trial                    # tiny, to try it out
    python -m scripts.bert_ladder --tables=ladder --model_size=base --batch_size=256

The ladder has the rungs of "Multi-node Bert-pretraining: Cost-efficient Approach"
(arXiv 2008.00177, of which the abstract is at hand): throughput of one device, then the
exchange. Each rung is one flag of `pretrain_bert` more, on the same real text. All are
timed in turn, beside PyTorch's step if it is installed; on a GPU if JAX has one. The
scaling table has real runs of 1, 2 and 4 processes, on CPUs, in which a sleep stands in
for a larger model (--emulate_compute). The cost is planned, not measured
(scripts/plans/bert.py).
"""

import dataclasses
import pathlib
import time
from typing import Any

from absl import flags

from experiments import shared_flags
from experiments.bert import data
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.runtime.life import sigterm
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import report
from scripts.ladder import markdown, scaling, sequences, settings, timings
from scripts.plans import bert as plan

flags.adopt_module_key_flags(settings)
for _name in (*settings.OF_RUN, "out"):
    flags.declare_key_flag(_name)


def measure(given: settings.Settings) -> dict[str, Any]:
    """Makes the tables of a record.

    Args:
      given: the settings.

    Raises:
      errors.NebulaError: if the text cannot be had, or a run fails.
    """
    found: dict[str, Any] = {"seed": given.run.agreed.seed}
    run = data.checked(given.run)
    path = data.shared_vocabulary(run)
    run = run.with_local(vocabulary=str(path))
    given = dataclasses.replace(given, run=run)
    if "ladder" in given.tables:
        vocabulary = vocabularies.given(run.local)
        text = sequences.read(run, vocabulary, given.curve_steps)
        found["ladder"] = timings.measure(given, vocabulary, text)
    if "scaling" in given.tables:
        found["scaling"] = scaling.measure(given, path)
    if "cost" in given.tables:
        found["cost"] = plan.record()
    return found


@sigterm.as_exit()
def main() -> int:
    """Measures, prints the tables, and writes --out."""
    begin = time.monotonic()
    given = settings.from_flags()
    devices.simulate(devices.Layout(devices_per_cluster=settings.DEVICES))
    found = measure(given)
    result = report.provenance(time.monotonic() - begin) | found
    report.show(markdown.markdown(result))
    if given.out:
        report.write(pathlib.Path(given.out), result)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, settings.DEFAULTS)
