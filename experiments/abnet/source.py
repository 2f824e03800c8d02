"""The source cluster of ABNet: reads X, sends H^E, takes its gradient back."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import lifecycle, progress, saved, shared_flags
from experiments.abnet import channels as abnet_channels
from experiments.abnet import config as abnet_config
from experiments.abnet import data as abnet_data
from experiments.abnet import models as abnet_models
from nebula_jax.communication import bridge, wan
from nebula_jax.data import example_alignment, length_buckets
from nebula_jax.models import abnet
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pipeline
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import cut
from nebula_jax.training import state as train_state


def run() -> int:
    """Trains the source side to the end; its exit status."""
    name = "source"
    interrupt = lifecycle.Interrupt().install()
    plm = abnet_models.load_source()
    text = abnet_data.read(abnet_data.own_folder(), plm.words, is_translated=True)
    examples = example_alignment.fingerprint(text.ids, abnet_data.id_key())

    agreed = abnet_config.settings(abnet_data.PAIR.value)
    own = {"source_model": plm.digest, "source_text": abnet_data.digest(text)}
    checkpoints = saved.Saved(name, agreed, own=own)
    config = plm.model.config
    with bridge.connect(
        shared_flags.host_and_port("peer", shared_flags.PEER.value),
        abnet_config.hello(name, agreed, checkpoints.steps, config, examples, own),
        connect_timeout=shared_flags.CONNECT_TIMEOUT.value,
        peer_timeout=shared_flags.PEER_TIMEOUT.value,
        reconnect_timeout=shared_flags.RECONNECT_TIMEOUT.value,
        peer="target",
        tls=shared_flags.client_tls(),
        line=wan.from_string(shared_flags.WAN.value).up,
        log=lifecycle.say,
        check=functools.partial(abnet_data.check_same_examples, text),
    ) as link:
        checkpoints.add_own(**abnet_config.peers_own(link.peer))
        side = Side(plm, text, abnet_config.peers_config(link.peer))
        ends = abnet_channels.open_ends(link, "source", len(side.rows), config.width)
        start = link.wait_for_welcome(shared_flags.CONNECT_TIMEOUT.value)
        state = side.restore(checkpoints, start)
        side.meet(ends)
        record = progress.Progress(name, start, lambda: progress.traffic([link]))

        interrupt.is_graceful = True
        last, step = shared_flags.STEPS.value, start
        while step < last:
            if interrupt.requested:
                link.stop()
            step += 1
            bucket, micro_batches = side.batch(step)
            params = side.all_params(state)
            grads, side.codecs[bucket], length_loss = pipeline.front_step(
                side.half,
                params,
                micro_batches,
                side.key,
                step,
                ends.hidden[bucket],
                ends.gradient[bucket],
                side.codecs[bucket],
                grads=cut.zero_grads(state.params),
                ahead=abnet_config.AHEAD.value,
            )
            state = side.apply(state, grads)
            record.step(step, side.metrics(step, length_loss))
            link.wait_for_step(step)
            last = link.stop_step or last
            if abnet_config.is_evaluated(step):
                side.send_judged(state, step, ends)
            if checkpoints.is_due(step):
                side.save(checkpoints, step, state)
        if start < step and step not in checkpoints.steps:
            side.save(checkpoints, step, state)
        ledger = {
            "ledger": link.ledger,
            "text": abnet_data.describe(text),
            "width": config.width,
            "trained_parameters": abnet_models.size(state),
        }
        record.finish(step, ledger)
    return lifecycle.exit_status(step, interrupt)


class Side:
    """What the source cluster has: its model, its sentences, its half of the step."""

    def __init__(self, plm: abnet_models.Plm, text: abnet_data.Text, target):
        """Puts the model on this cluster's devices.

        Args:
          plm: PLM-S and its tokenizer.
          text: of the source language.
          target: the shape of PLM-T.
        """
        self.text, self.rows = text, text.rows["train"]
        config = abnet_config.config(plm.model.config, target)
        self.task = abnet_config.task(config, source=abnet_config.controls(plm.words))
        self.mesh = abnet_config.mesh()
        trained, frozen = cut.split(
            abnet_models.source_params(config, plm.model),
            abnet_models.is_trained_source,
        )
        self.placed = mesh_lib.sharded_init_from_arrays(
            self.mesh, functools.partial(abnet_models.new_state, trained, 0)
        )
        self.frozen = abnet_models.place_frozen(self.mesh, frozen, plm.model.config)
        # Dropout belongs to the example: the same key at every step.
        self.key = jax.random.fold_in(jax.random.key(shared_flags.SEED.value), 20)
        self.half = cut.front(
            functools.partial(abnet_training.front, self.task),
            abnet_config.forward_codec().codec,
            abnet_config.backward_codec().codec,
            is_trained=abnet_models.is_trained_source,
            has_loss=True,
        )
        self.codecs = abnet_channels.init_codecs(self.half, config.source.width)
        self.apply = jax.jit(
            lambda state, grads: state.apply_gradients(grads, abnet_config.optimizer()),
            donate_argnums=0,
        )
        self._encode = jax.jit(self._judge)
        self.own_lengths = self.rows.lengths
        self.buckets = length_buckets.bucket_of(
            self.own_lengths, abnet_config.buckets()
        )
        self.order = length_buckets.Schedule(
            self.buckets, shared_flags.BATCH_SIZE.value, shared_flags.SEED.value
        )
        self.lengths = np.zeros(len(self.rows), np.int32)

    def meet(self, ends: abnet_channels.Ends) -> None:
        """Tells the other side the buckets, and is told the lengths of its rows."""
        ends.buckets.send(0, self.buckets)
        if ends.lengths is not None:
            self.lengths = np.asarray(ends.lengths.recv(0))

    def all_params(self, state: train_state.TrainState):
        """Trained and frozen."""
        return abnet_models.with_frozen(state, self.frozen)

    def batch(
        self, step: int, micro_batches: int | None = None
    ) -> tuple[int, Iterator[abnet_training.SourceBatch]]:
        """Which bucket a step is of, and its micro-batches, made as they are due."""
        bucket, indices = self.order.batch(step - 1)
        capacity = abnet_config.buckets()[bucket]
        lengths = self.lengths[indices]
        is_cmlm = abnet_config.OBJECTIVE.value == "cmlm"
        tokens = np.float32(lengths.sum() if is_cmlm else 1)
        parts = micro_batches or abnet_config.MICRO_BATCHES.value
        split = length_buckets.micro_batches(indices, parts)
        return bucket, (
            self._put(
                abnet_training.SourceBatch(
                    self.rows.rows(own, capacity, self.text.words.special.pad),
                    own,
                    self.lengths[own],
                    tokens,
                )
            )
            for own in split
        )

    def _put(self, batch: abnet_training.SourceBatch) -> abnet_training.SourceBatch:
        at, everywhere = (
            mesh_lib.batch_sharding(self.mesh),
            mesh_lib.replicated(self.mesh),
        )
        return jax.device_put(
            batch,
            batch._replace(input_ids=at, example_ids=at, lengths=at, tokens=everywhere),
        )

    def metrics(self, step: int, length_loss: jax.Array) -> dict[str, Any]:
        """For the progress line: tokens are those of the source."""
        tokens = self.own_lengths[self.order.batch(step - 1).indices].sum()
        return {"loss": length_loss, "tokens": np.float32(tokens)}

    def restore(self, checkpoints: saved.Saved, step: int) -> train_state.TrainState:
        """The state after `step`; the codecs are given theirs."""
        like = mesh_lib.sharded_init_with_codecs(self.placed, self.mesh, self.codecs)
        both, _ = checkpoints.restore(step, like)
        self.codecs = both["codecs"]
        return both["state"]

    def save(self, checkpoints: saved.Saved, step: int, state) -> None:
        """Saves the state after `step`, and the codecs'."""
        checkpoints.save(step, {"state": state, "codecs": self.codecs})

    def send_judged(self, state, step: int, ends: abnet_channels.Ends) -> None:
        """Sends H^E of the sentences that are translated after `step`."""
        params = self.all_params(state)
        number = 0
        for split in judged_splits(self.text, step):
            for hidden in self.encoded(params, split):
                ends.evaluation.send(step, hidden, number)
                number += 1

    def encoded(self, params, split: str) -> Iterator[dict[str, jax.Array]]:
        """What crosses of a split's sentences, batch by batch."""
        rows = self.text.rows[split]
        of = abnet_data.chosen(abnet_config.BLEU_SENTENCES.value, len(rows))
        size = shared_flags.BATCH_SIZE.value
        for batch in abnet_data.evaluation_batches(rows, of, size):
            capacity = abnet_config.buckets()[batch.bucket]
            index = of[batch.indices].astype(np.int32)
            ids = rows.rows(index, capacity, self.text.words.special.pad)
            # A row that only fills the batch up is no example.
            index[batch.count :] = -1
            yield self._encode(params, ids, index)

    def _judge(self, params, input_ids, index):
        mask = input_ids != self.text.words.special.pad
        encoded = abnet.encode(self.task.config, params, input_ids, mask)
        missing = abnet_config.buckets()[-1] - input_ids.shape[1]
        hidden = {
            "hidden": jnp.pad(encoded.hidden, ((0, 0), (0, missing), (0, 0))),
            "mask": jnp.pad(mask, ((0, 0), (0, missing))),
            "index": index,
        }
        if encoded.length_logits is not None:
            bits = jax.lax.bitcast_convert_type(encoded.length_logits, jnp.int32)
            hidden["length_logits"] = bits
        return hidden


def judged_splits(text: abnet_data.Text, step: int) -> list[str]:
    """What is translated after `step`: dev, and at the end the test sets as well."""
    if step < shared_flags.STEPS.value:
        return ["dev"]
    return [name for name in text.ids if name != "train"]
