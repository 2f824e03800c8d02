"""The target cluster of ABNet: reads Y, takes H^E, answers with its gradient."""

import functools
import itertools
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
from experiments.abnet import source as abnet_source
from nebula_jax.communication import bridge, wan
from nebula_jax.communication.wire import session
from nebula_jax.data import example_alignment, length_buckets
from nebula_jax.evaluation import abnet_translate, bleu, hypotheses
from nebula_jax.models import abnet
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pipeline
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import cut
from nebula_jax.training import state as train_state


def run() -> int:
    """Trains the target side to the end; its exit status."""
    name = "target"
    interrupt = lifecycle.Interrupt().install()
    abnet_models.prepare_target(abnet_data.own_folder())
    plm = abnet_models.load_target()
    text = abnet_data.read(abnet_data.own_folder(), plm.words, is_translated=False)
    examples = example_alignment.fingerprint(text.ids, abnet_data.id_key())

    agreed = abnet_config.settings(abnet_data.PAIR.value)
    own = {
        "target_model": abnet_models.target_digest(),
        "target_text": abnet_data.digest(text),
    }
    checkpoints = saved.Saved(name, agreed, own=own)
    hello = abnet_config.hello(
        name, agreed, checkpoints.steps, plm.model.config, examples, own
    )
    with (
        bridge.Listener(
            shared_flags.listening_socket(),
            hello,
            peer_timeout=shared_flags.PEER_TIMEOUT.value,
            reconnect_timeout=shared_flags.RECONNECT_TIMEOUT.value,
            tls=shared_flags.server_tls(),
            line=wan.from_string(shared_flags.WAN.value).down,
            log=lifecycle.say,
            check=functools.partial(abnet_data.check_same_examples, text),
        ) as listener,
        listener.accept(shared_flags.CONNECT_TIMEOUT.value) as link,
    ):
        if link.peer.cluster != "source":
            raise bridge.Mismatch(f"{link.peer.cluster} came; source was expected")
        checkpoints.add_own(**abnet_config.peers_own(link.peer))
        source = abnet_config.peers_config(link.peer)
        side = Side(plm, text, source)
        ends = abnet_channels.open_ends(link, "target", len(side.rows), source.width)
        have = {name: checkpoints.steps, "source": link.peer.checkpoints}
        start = saved.newest_of_all(have)
        link.welcome(start)
        state = side.restore(checkpoints, start)
        side.meet(ends)
        record = progress.Progress(name, start, lambda: progress.traffic([link]))

        interrupt.is_graceful = True
        last, step = shared_flags.STEPS.value, start
        while step < last:
            step += 1
            bucket, micro_batches = side.batch(step)
            grads, side.codecs[bucket], metrics = pipeline.back_step(
                side.half,
                side.all_params(state),
                micro_batches,
                state.key(),
                step,
                ends.hidden[bucket],
                ends.gradient[bucket],
                side.codecs[bucket],
                grads=cut.zero_grads(state.params),
            )
            side.check(step, metrics)
            if last > step and (interrupt.requested or link.stop_step is not None):
                last = step
                lifecycle.say(f"{name}: stopping, both clusters save step {last}")
                link.stop(last)
            link.step_done(step)
            state = side.apply(state, grads)
            record.step(step, side.told(metrics))
            if abnet_config.is_evaluated(step):
                record.evaluation(step, side.judge(state, step, ends.evaluation))
            if checkpoints.is_due(step):
                side.save(checkpoints, step, state)
        if start < step and step not in checkpoints.steps:
            side.save(checkpoints, step, state)
        ledger = {
            "ledger": link.ledger,
            "text": abnet_data.describe(text),
            "trained_parameters": abnet_models.size(state),
        }
        record.finish(step, ledger)
    return lifecycle.exit_status(step, interrupt)


class Side:
    """What the target cluster has: its model, its sentences, its half of the step."""

    def __init__(self, plm: abnet_models.Plm, text: abnet_data.Text, source):
        """Puts the model on this cluster's devices.

        Args:
          plm: PLM-T and its tokenizer.
          text: of the target language.
          source: the shape of PLM-S.
        """
        self.text, self.rows = text, text.rows["train"]
        config = abnet_config.config(source, plm.model.config)
        controls = abnet_config.controls(plm.words)
        self.task = abnet_config.task(config, target=controls)
        self.mesh = abnet_config.mesh()
        trained, frozen = cut.split(
            abnet_models.target_params(config, plm.model),
            abnet_models.is_trained_target(),
        )
        self.placed = mesh_lib.sharded_init_from_arrays(
            self.mesh, functools.partial(abnet_models.new_state, trained, 1)
        )
        self.frozen = abnet_models.place_frozen(self.mesh, frozen, plm.model.config)
        self.half = cut.back(
            functools.partial(abnet_training.back, self.task),
            abnet_config.forward_codec().codec,
            abnet_config.backward_codec().codec,
            is_trained=abnet_models.is_trained_target(),
            sharding=mesh_lib.batch_sharding(self.mesh),
        )
        self.codecs = abnet_channels.init_codecs(self.half, config.source.width)
        self.apply = jax.jit(
            lambda state, grads: state.apply_gradients(grads, abnet_config.optimizer()),
            donate_argnums=0,
        )
        self._translate = jax.jit(self._decoded, static_argnums=2)
        self.lengths = self.rows.lengths
        self.order: length_buckets.Schedule | None = None

    def meet(self, ends: abnet_channels.Ends) -> None:
        """Is told the source's buckets, and tells the lengths of its own rows."""
        buckets = np.asarray(ends.buckets.recv(0))
        if buckets.max(initial=0) >= len(abnet_config.buckets()):
            raise session.RemoteProtocolError("source named a bucket that is none")
        self.sort(buckets)
        if ends.lengths is not None:
            ends.lengths.send(0, self.lengths)

    def sort(self, buckets: np.ndarray) -> None:
        """Takes the length buckets of the source's rows, [N] uint8."""
        self.order = length_buckets.Schedule(
            buckets, shared_flags.BATCH_SIZE.value, shared_flags.SEED.value
        )

    def all_params(self, state: train_state.TrainState) -> Any:
        """Trained and frozen."""
        return abnet_models.with_frozen(state, self.frozen)

    def batch(
        self, step: int, micro_batches: int | None = None
    ) -> tuple[int, Iterator[abnet_training.TargetBatch]]:
        """Which bucket the source rows of a step are of, and its micro-batches."""
        bucket, indices = self.order.batch(step - 1)
        lengths = self.lengths
        capacity = abnet_data.capacity(lengths[indices])
        tokens = np.float32(lengths[indices].sum())
        parts = micro_batches or abnet_config.MICRO_BATCHES.value
        split = length_buckets.micro_batches(indices, parts)
        most = max(split, key=lambda own: lengths[own].sum())
        slots = abnet_data.slots(
            lengths[most], len(most), capacity, abnet_config.OBJECTIVE.value
        )
        return bucket, (
            self._put(
                abnet_training.TargetBatch(
                    self.rows.rows(own, capacity, self.text.words.special.pad),
                    own,
                    tokens,
                    slots,
                )
            )
            for own in split
        )

    def _put(self, batch: abnet_training.TargetBatch) -> abnet_training.TargetBatch:
        at = mesh_lib.batch_sharding(self.mesh)
        everywhere = mesh_lib.replicated(self.mesh)
        where = abnet_training.TargetBatch(at, at, everywhere, everywhere)
        return jax.device_put(batch, where)

    def check(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Raises RemoteProtocolError if the hidden states were of other examples."""
        if float(metrics["mismatched_examples"]):
            raise session.RemoteProtocolError(
                f"source sent hidden states of other examples than step {step} has:"
                " the two sides sort their examples differently"
            )

    def told(self, metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """For the progress line: per prediction where that says more."""
        predicted = jnp.maximum(metrics["predicted"], 1.0)
        return {
            "loss": metrics["loss"],
            "tokens": metrics["tokens"],
            "accuracy": metrics["correct"] / predicted,
            "unasked": metrics["dropped_targets"],
        }

    def restore(self, checkpoints: saved.Saved, step: int) -> train_state.TrainState:
        """The state after `step`; the codecs are given theirs."""
        like = mesh_lib.sharded_init_with_codecs(self.placed, self.mesh, self.codecs)
        both, _ = checkpoints.restore(step, like)
        self.codecs = both["codecs"]
        return both["state"]

    def save(self, checkpoints: saved.Saved, step: int, state) -> None:
        """Saves the state after `step`, and the codecs'."""
        checkpoints.save(step, {"state": state, "codecs": self.codecs})

    def judge(self, state, step: int, judged) -> dict[str, dict[str, float]]:
        """Translates what the source side sends, and compares it with our side.

        Returns:
          Split -> {"bleu", "sentences"}.
        """
        params = self.all_params(state)
        numbers = itertools.count()
        found = {}
        for split in abnet_source.judged_splits(self.text, step):
            wanted = min(abnet_config.BLEU_SENTENCES.value, len(self.text.ids[split]))
            translated: dict[int, str] = {}
            while len(translated) < wanted:
                hidden = judged.recv(step, next(numbers))
                translated |= self.translated(params, hidden)
            if translated.keys() != set(range(wanted)):
                raise session.RemoteProtocolError(
                    f"source sent other sentences of {split} than this side has"
                )
            found[split] = self._score(step, split, translated)
        return found

    def _score(
        self, step: int, split: str, translated: dict[int, str]
    ) -> dict[str, float]:
        order = sorted(translated)
        hypotheses = [translated[index] for index in order]
        references = [self.text.texts[split][index] for index in order]
        score = bleu.corpus_bleu(hypotheses, references)
        folder = shared_flags.cluster_folder("target") / "translations"
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{line}\n" for line in hypotheses)
        (folder / f"{split}-{step:08d}.txt").write_text(lines, "utf-8")
        lifecycle.say(f"target: step {step}, {split}: {score}")
        return {"bleu": score.score, "sentences": float(len(order))}

    def translated(self, params: Any, hidden: Any) -> dict[int, str]:
        """Number of each example -> its translation."""
        index = np.asarray(hidden["index"])
        longest = abnet_data.capacity(np.asarray(hidden["mask"]).sum(axis=1))
        ids = np.asarray(self._translate(params, hidden, longest).ids)
        return {
            int(number): self.text.words.decode(row)
            for number, row in zip(index, ids, strict=True)
            if number >= 0
        }

    def _decoded(
        self, params: Any, hidden: Any, longest: int
    ) -> hypotheses.Translations:
        bits = hidden.get("length_logits")
        logits = (
            None if bits is None else jax.lax.bitcast_convert_type(bits, jnp.float32)
        )
        return translate(
            self.task,
            params,
            abnet.Encoded(hidden["hidden"][:, :longest], logits),
            hidden["mask"][:, :longest],
        )


def translate(
    task: abnet_training.Task, params: Any, encoded: abnet.Encoded, mask: jax.Array
) -> hypotheses.Translations:
    """Decodes as --objective and --beams say; to be jitted."""
    arguments = (task.config, params, encoded, mask, task.target_controls)
    if task.config.objective == "ar":
        return abnet_translate.by_beam_search(
            *arguments, beams=abnet_config.BEAMS.value
        )
    return abnet_translate.by_mask_predict(
        *arguments,
        candidates=abnet_config.BEAMS.value,
        iterations=abnet_config.ITERATIONS.value,
    )
