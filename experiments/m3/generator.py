"""One generator of M3: batch, step, send; never further ahead than the window.

B rows of a micro-batch, L length.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from experiments.m3 import channels, config, data, models
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax.communication.channels import Sender
from nebula_jax.evaluation import rtd
from nebula_jax.parallel import fan_out
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import m3, m3_predictions

LEADER = "discriminator"


def train(run: config.Run, index: int) -> int:
    """Trains generator `index` to the end; returns the exit status."""
    agreed, context = run.agreed, config.context(run, part=0)
    vocabulary = shared_vocabulary.given(run.local)
    text = data.text_of(run, index, vocabulary, context.work)
    context.stop_when(lambda: text.end)
    made = models.load(run, vocabulary)
    mesh = devices.mesh(run.local.layout(), agreed.batch_size, agreed.micro_batches)
    fresh = models.generator_init(mesh, made, agreed.seed, index)
    train_step = fan_out.generator_step(made.config, mesh, fresh)
    corrupt = held_out_corruption(made.config, mesh, fresh)

    settings = config.settings(run, vocabulary)
    saved = run.open_checkpoints(context, settings)
    hello = run.hello(settings, saved.steps)
    with text, context.connected(hello, [LEADER, hello.cluster], hub=LEADER) as peers:
        link = peers.links[LEADER]
        # All that crosses: m3.Tokens, of training and held-out text: the whole text.
        tokens, held_out = channels.senders(
            link, made.config, agreed.batch_size, vocabulary.size
        )
        # The discriminator names the newest step that every cluster has saved.
        start = context.agree_start(peers)
        state, position = saved.restore(start, fresh)
        rows = agreed.fan_out * agreed.batch_size
        text.begin(position, rows, mesh_lib.rows_here(mesh, rows))
        context.begin(start, [link])
        send = functools.partial(send_tokens, context, tokens)
        frequencies = rtd.Unigrams(vocabulary.size)
        if start == 0:
            send_held_out(context, held_out, 0, corrupt, state.params, text)
        for step in context.each(context.follow(link)):
            with context.trace.span("next batch"):
                ids = next(text.batches)
                frequencies.add(ids)
                batch = mesh_lib.put_rows(mesh, ids, rows)
            # With fan_out > 1 each micro-batch leaves before the gradient step.
            state, metrics = context.compute(
                step, train_step, state, batch, functools.partial(send, step)
            )
            context.record.step(step, metrics)
            if agreed.is_evaluated(step):
                send_held_out(context, held_out, step, corrupt, state.params, text)
            saved.after(step, state, text.position)
        saved.at_end(context.step, state, text.position)
        # The discriminator may still want what was sent last.
        link.wait_for_step(context.step)
        described = {"ledger": link.ledger, "outages": link.outages}
        context.finish(described | {"unigram_entropy": frequencies.entropy()})
    return context.exit_status()


def held_out_corruption(
    config: m3.Config, mesh: jax.sharding.Mesh, fresh: mesh_lib.ShardedInit
) -> Callable[[Any, jax.Array, jax.Array], m3.Tokens]:
    """Compiles (params, rng, [B, L] int32) -> Tokens, for held-out text."""
    batch_at = mesh_lib.batch_sharding(mesh)
    corrupt = jax.jit(
        functools.partial(m3_predictions.corrupt, config),
        in_shardings=(fresh.sharding.params, mesh_lib.replicated(mesh), batch_at),
        out_shardings=batch_at,
    )
    return lambda params, rng, ids: corrupt(params, rng, mesh_lib.put(ids, batch_at))


def send_tokens(
    context: context_lib.Context,
    channel: Sender,
    step: int,
    corrupted: m3.Tokens,
    number: int,
) -> None:
    """Sends micro-batch `number` of a step."""
    context.emulate_compute()
    channel.send(step, corrupted, number)


def send_held_out(
    context: context_lib.Context,
    channel: Sender,
    step: int,
    corrupt: Callable[[Any, jax.Array, jax.Array], m3.Tokens],
    params: Any,
    text: text_lib.Text,
) -> None:
    """Sends held-out text, masked alike every time, with samples of after `step`."""
    with context.evaluating():
        for micro_batch, (_, batch) in enumerate(text.held_out()):
            rng = text_lib.held_out_rng(micro_batch)
            channel.send(step, corrupt(params, rng, batch), micro_batch)
