"""Evaluation of a BERT run: the loss on held-out text, with the same masks every time.

B rows of a held-out batch, L length.
"""

import collections
from typing import Any

import jax
import numpy as np

from experiments.bert import copies
from experiments.pretraining import text as text_lib
from nebula_jax.parallel import mesh as mesh_lib


def evaluate(
    copy: copies.Copy, trained: Any, text: text_lib.Text
) -> dict[str, dict[str, float]]:
    """Returns language -> `mlm_loss` in nats a masked token, and `mlm_accuracy`.

    Args:
      copy: of the cluster.
      trained: its parameters that train.
      text: of the cluster, of which every process has what is held out.
    """
    sums: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(3))
    everywhere = mesh_lib.replicated(copy.mesh)
    for number, (language, batch) in enumerate(text.held_out()):
        rng = text_lib.held_out_rng(number)
        ids = mesh_lib.put(batch, everywhere)
        found = copy.evaluate(trained, copy.frozen, rng, ids)
        sums[language] += np.asarray(jax.device_get(tuple(found)))
    return {
        language: {"mlm_loss": loss / masked, "mlm_accuracy": correct / masked}
        for language, (loss, masked, correct) in sums.items()
    }
