"""The beginning of a run's bottleneck: the best directions of its own text.

The source side finds them in the hidden states of some of its sentences, before the
first step, and sends the target side what the readers there need to begin with. A run
that goes on has both in its checkpoints.

D width of PLM-S.
"""

import dataclasses
import functools
import operator

import jax
import numpy as np

from experiments.abnet import config, data, models
from nebula_jax.communication import channels, ranks
from nebula_jax.models import abnet, bottleneck, transformer
from nebula_jax.runtime.life import process

SENTENCES = 1024  # some ten thousand tokens, for products of a few hundred columns


def of_text(
    run: config.Run, plm: models.Plm, text: data.Text, target: transformer.Config
) -> bottleneck.Start:
    """Finds the best bottleneck for this side's hidden states as they are at step 0.

    Args:
      run: of this process.
      plm: PLM-S.
      text: of the source side.
      target: shape of PLM-T.
    """
    agreed = run.agreed
    translator = dataclasses.replace(
        models.model(agreed, plm.model.config, target), bottleneck=0
    )
    params = models.params_of(agreed, translator, plm.model, models.SOURCE)

    @jax.jit
    def moments(params: abnet.Params, ids: jax.Array, count: int) -> bottleneck.Moments:
        mask = ids != plm.tokenizer.special.pad
        hidden = abnet.encode(translator, params, ids, mask).hidden
        is_real = np.arange(len(ids)) < count  # others only fill the batch up
        return bottleneck.moments(hidden, mask & is_real[:, None])

    rows = text.train
    indices = np.linspace(0, len(rows) - 1, min(SENTENCES, len(rows))).astype(int)
    found = []
    with process.timed(
        f"finding the {agreed.bottleneck} best directions of hidden states"
    ):
        for batch in data.evaluation_batches(agreed, rows, indices):
            length = agreed.length_buckets[batch.bucket]
            index = indices[batch.indices]
            ids = rows.rows(index, length, plm.tokenizer.special.pad)
            found.append(jax.device_get(moments(params, ids, batch.count)))
    total = functools.reduce(
        lambda so_far, new: bottleneck.Moments(*map(operator.add, so_far, new)), found
    )
    return bottleneck.start(total, agreed.bottleneck)


def send(end: channels.Sender, beginning: bottleneck.Start) -> bottleneck.Start:
    """Sends how the target begins; returns what all processes of this side begin with.

    Args:
      end: of the channel `bottleneck`.
      beginning: from `of_text`; of the root, if the cluster has several processes.
    """
    same = ranks.everywhere(
        ranks.from_root(beginning, jax.eval_shape(lambda: beginning))
    )
    same = bottleneck.Start(*map(np.asarray, same))
    end.send(0, same)
    return same


def receive(end: channels.Receiver) -> bottleneck.Start:
    """Receives what `send` sends."""
    return bottleneck.Start(*map(np.asarray, ranks.everywhere(end.recv(0))))
