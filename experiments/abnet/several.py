"""Several pairs of an ABNet run in one process, without a line.

The reference that a run over several pairs of clusters equals, to the last bit. What
crosses within a pair goes through the codecs, and so does what crosses between pairs.
Each cluster is saved where its own process saves it, so a run can begin here and go on
over several clusters, or the other way round.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments import configuration
from experiments.abnet import (
    batches,
    channels,
    config,
    data,
    evaluation,
    hello,
    models,
    pairs,
    replicas,
    target_model,
    whole,
)
from experiments.abnet import target as target_side
from nebula_jax import trace as trace_lib
from nebula_jax.communication import loopback
from nebula_jax.communication.wire import activity
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints, progress

SIDES: tuple[pairs.Role, ...] = ("source", "target")
"""In the order of `whole.Both`."""


def train(run: config.Run, folders: whole.Folders) -> int:
    """Trains all pairs to the end; returns the exit status."""
    agreed, local, local_steps = run.agreed, run.local, run.agreed.local_steps()
    interrupt = process.Interrupt().install()
    trace = trace_lib.Trace(local.trace)
    work = activity.Work(trace=trace)
    both = whole.load(run, folders)
    source, target = both.halves
    encode = evaluation.encoder(agreed, source.task)
    decode = evaluation.decoder(agreed, target.task)

    names = [pairs.names(agreed, role) for role in SIDES]
    members = [
        [replicas.member(agreed, name, half) for name in of_side]
        for of_side, half in zip(names, both.halves, strict=True)
    ]
    rounds = [replicas.Rounds(agreed, of_side) for of_side in members]
    saved = _checkpoints(run, both, work)
    start = checkpoints.newest_of_all(
        {name: each.steps for name, each in saved.items()},
        *(agreed.checkpoint_every, agreed.window()),
    )
    states: list[replicas.States] = []
    codecs: list[list[Any]] = []
    for side, half in enumerate(both.halves):
        restored, positions = [], []
        for name, member in zip(names[side], members[side], strict=True):
            fresh = replicas.planned(_fresh(agreed, both, half), half.mesh, member)
            values, position = saved[name].restore(start, fresh)
            restored.append(values)
            positions.append(position)
        rounds[side].go_on(restored, positions)
        states.append([each["state"] for each in restored])
        codecs.append([each["codecs"] for each in restored])
    record = progress.Progress(
        *(local.workdir, local.cluster, start, agreed.steps, local.log_every),
        work=work,
        allow_nonfinite=local.allow_nonfinite,
    )
    for each in saved.values():
        each.before_save = record.settle

    carriers = [loopback.ends() for _ in range(agreed.replicas)]
    size = len(both.texts[0].train), both.plms[0].model.config.width
    ends = [
        tuple(
            channels.open_ends(agreed, carrier, role, *size)
            for carrier, role in zip(of_pair, SIDES, strict=True)
        )
        for of_pair in carriers
    ]
    buckets = batches.row_buckets(agreed, both.texts[0])
    take_step = [
        whole.in_process(
            agreed,
            both._replace(order=batches.Schedule(agreed, buckets, pair)),
            ends[pair],
            (codecs[0][pair], codecs[1][pair]),
        )
        for pair in range(agreed.replicas)
    ]

    def arrays(side: int, pair: int) -> dict[str, Any]:
        own = {"state": states[side][pair], "codecs": codecs[side][pair]}
        return own | rounds[side].arrays(pair)

    def save(step: int, is_last: bool = False) -> None:
        for side, of_side in enumerate(names):
            for pair, name in enumerate(of_side):
                if not is_last or step not in saved[name].steps:
                    position = rounds[side].position(pair)
                    saved[name].save(step, arrays(side, pair), position)

    interrupt.is_graceful = True
    step = start
    steps = pace.alone(
        *(start, agreed.steps),
        # Not while a message is under way: it could not be saved.
        lambda: interrupt.requested() and not local_steps.is_in_flight(step),
    )
    for step in steps:
        of_all = []
        for pair in range(agreed.replicas):
            with trace.span("compute", step=step, part=f"pair {pair}"):
                own = states[0][pair], states[1][pair]
                grads, at_source, metrics = take_step[pair](own, step)
                metrics = target_side.step_metrics(metrics)
                first, of_source = source.apply(own[0], grads[0], metrics | at_source)
                second, metrics = target.apply(own[1], grads[1], metrics)
                states[0][pair], states[1][pair] = trace.ready((first, second))
            metrics["is_finite"] &= of_source["is_finite"]
            of_all.append(metrics)
        for side, of_side in enumerate(rounds):
            states[side], _ = of_side.after(step, states[side])
            if step == agreed.steps:
                states[side] = of_side.finish(step, states[side])
        record.step(step, _together(of_all))
        if agreed.is_evaluated(step):
            params = source.params(states[0][0]), target.params(states[1][0])
            sender, receiver = (end.evaluation for end in ends[0])
            with work.busy(activity.Activity.EVALUATING):
                evaluation.send(agreed, both.texts[0], encode, params[0], step, sender)
                figures = evaluation.evaluate(
                    run, both.texts[1], decode, params[1], step, receiver
                )
            record.evaluation(step, figures)
        if agreed.is_saved_after(step):
            save(step)
    if step > start:
        save(step, is_last=True)
    sent: collections.Counter[str] = collections.Counter()
    for one, other in carriers:
        sent += one.out.sent + other.out.sent
    described = {
        "text": data.describe(both.texts[0]),
        "sent": dict(sent),
        "trained_parameters": sum(
            models.trained_parameters(of_side[0]) for of_side in states
        ),
        "rounds": {
            role: each.described for role, each in zip(SIDES, rounds, strict=True)
        },
    }
    record.finish(step, described)
    return interrupt.exit_status(local.cluster, step, agreed.steps)


def _checkpoints(
    run: config.Run, both: whole.Both, work: activity.Work
) -> dict[str, checkpoints.Checkpoints]:
    """Returns the checkpoints of all clusters, each as its own process has them."""
    agreed, source, target = run.agreed, both.plms[0], target_model.fingerprint(run)
    digests = {
        "source": {
            "source_model": source.digest,
            "source_text": data.digest(run, both.texts[0]),
        },
        "target": {
            "target_model": target,
            "target_text": data.digest(run, both.texts[1]),
        },
    }
    found = {}
    for name in pairs.clusters(agreed):
        other = pairs.other_half(name)
        own = digests[pairs.role_of(name)]
        found[name] = checkpoints.Checkpoints(
            *(run.local.workdir, name, configuration.settings(agreed)),
            *(agreed.checkpoint_every, agreed.window()),
            fingerprints=own | hello.of_peer(digests[pairs.role_of(other)]),
            work=work,
        )
    return found


def _fresh(
    agreed: config.Agreed, both: whole.Both, half: models.Half
) -> mesh_lib.ShardedInit:
    """Returns the state of one cluster at step 0 with those of its channels' codecs.

    It is for one alone: a step uses up what it is given.
    """
    width = both.plms[0].model.config.width
    new = channels.init_codecs(agreed, half.program, width)
    return mesh_lib.sharded_init_with_codecs(half.fresh, half.mesh, new)


def _together(of_all: Sequence[Mapping[str, Any]]) -> dict[str, jax.Array]:
    """Returns the metrics of a step of all pairs: means, and the sum of tokens."""
    found = {
        name: jnp.mean(jnp.stack([each[name] for each in of_all])) for name in of_all[0]
    }
    found["tokens"] = sum(each["tokens"] for each in of_all)
    found["is_finite"] = jnp.all(jnp.stack([each["is_finite"] for each in of_all]))
    return found
