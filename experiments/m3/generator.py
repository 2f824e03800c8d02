"""One generator of M3: batch, step, send; never further ahead than the window."""

import functools

import jax

from experiments import lifecycle, progress, saved, shared_flags
from experiments.m3 import config as m3_config
from experiments.m3 import data as m3_data
from experiments.m3 import models as m3_models
from nebula_jax.communication import bridge, codecs, wan
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace
from nebula_jax.training import m3


def run(index: int) -> int:
    """Trains generator `index` to the end; its exit status."""
    name = f"generator:{index}"
    interrupt = lifecycle.Interrupt().install()
    vocabulary = m3_data.given_vocabulary()
    text = m3_data.open_generator(index, vocabulary)
    models = m3_models.load(vocabulary)
    config = models.config

    mesh = shared_flags.mesh()
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    placed = m3_models.place_generator(mesh, models, index)
    train = jax.jit(
        functools.partial(m3.generator_step, config),
        in_shardings=(placed.sharding, batch_at),
        out_shardings=(placed.sharding, batch_at, everywhere),
        donate_argnums=0,
    )
    corrupt = jax.jit(
        functools.partial(m3.corrupt, config),
        in_shardings=(placed.sharding.params, everywhere, batch_at),
        out_shardings=batch_at,
    )

    agreed = m3_config.settings(vocabulary, text.owners)
    checkpoints = saved.Saved(name, agreed, m3_config.WINDOW.value)
    with bridge.connect(
        shared_flags.host_and_port("peer", shared_flags.PEER.value),
        m3_config.hello(name, agreed, checkpoints.steps),
        connect_timeout=shared_flags.CONNECT_TIMEOUT.value,
        peer_timeout=shared_flags.PEER_TIMEOUT.value,
        reconnect_timeout=shared_flags.RECONNECT_TIMEOUT.value,
        peer="discriminator",
        tls=shared_flags.client_tls(),
        line=wan.from_string(shared_flags.WAN.value).up,
        log=lifecycle.say,
    ) as link:
        spec = m3.tokens_spec(config, shared_flags.BATCH_SIZE.value)
        pack = codecs.pack_ids(vocabulary.size)
        tokens = link.sender("tokens", spec, pack)
        held_back = link.sender("held_back", spec, pack)
        start = link.wait_for_welcome(shared_flags.CONNECT_TIMEOUT.value)
        state, position = checkpoints.restore(start, placed)
        text.go_to(position)
        record = progress.Progress(name, start, lambda: progress.traffic([link]))

        def send_held_back(step: int) -> None:
            for micro_batch, (_, batch) in enumerate(text.held_back()):
                rng = m3_data.held_back_rng(micro_batch)
                corrupted = corrupt(state.params, rng, batch)
                held_back.send(step, corrupted, micro_batch)

        if start == 0:
            send_held_back(0)
        interrupt.is_graceful = True
        last, step = shared_flags.STEPS.value, start
        while step < last:
            if interrupt.requested:
                link.stop()
            link.wait_for_step(pace.token_needed(step + 1, m3_config.WINDOW.value))
            last = link.stop_step or last
            if step >= last:
                break
            step += 1
            batch = jax.device_put(next(text.batches), batch_at)
            state, corrupted, metrics = train(state, batch)
            tokens.send(step, corrupted)
            record.step(step, metrics)
            if m3_config.is_evaluated(step):
                send_held_back(step)
            if checkpoints.is_due(step):
                checkpoints.save(step, state, text.position())
        if start < step and step not in checkpoints.steps:
            checkpoints.save(step, state, text.position())
        link.wait_for_step(step)
        record.finish(step, {"ledger": link.ledger})
    return lifecycle.exit_status(step, interrupt)
