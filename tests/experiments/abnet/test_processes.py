"""ABNet's clusters of two processes each, beside clusters of two devices."""

import numpy as np
import pytest
import tiny_translations
import trees

from nebula_jax.evaluation import sentence_scores

STEPS = 8  # an epoch has 6
RUN = {
    "steps": STEPS,
    "checkpoint_every": STEPS,
    "devices_per_cluster": 2,
    "held_out_pairs": 12,
    "forward_codec": "pack_tokens|int8(8)|zstd(1)",
    "backward_codec": "error_feedback(int8(8))",
    # Soon compiled: four processes compile each program.
    **tiny_translations.ALIKE,
    "objective": "cmlm",
}


@pytest.mark.slow
def test_two_processes_a_cluster_train_what_one_does(runs):
    for processes in (1, 2):
        given = {"workdir": str(processes), "processes_per_cluster": processes}
        runs.finished(**RUN | given, timeout=300)
    one, two = (runs.sides(each, STEPS) for each in "12")
    trees.assert_close(two, one, rtol=0, atol=1e-6)
    file = f"target/translations/held_out-{STEPS:08d}.scores.tsv"
    one, two = (
        sentence_scores.loads((runs.folder / each / file).read_text()) for each in "12"
    )
    assert sentence_scores.are_paired(one, two)
    np.testing.assert_allclose(two.nats, one.nats, rtol=1e-4)
