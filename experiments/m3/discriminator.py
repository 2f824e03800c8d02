"""The discriminator of M3: receive from every generator, step, send the step token."""

import contextlib
import functools
import time

import jax

from experiments import lifecycle, progress, saved, shared_flags
from experiments.m3 import config as m3_config
from experiments.m3 import data as m3_data
from experiments.m3 import models as m3_models
from nebula_jax.communication import bridge, codecs, wan
from nebula_jax.evaluation import rtd
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace
from nebula_jax.training import m3


def run() -> int:
    """Trains the discriminator to the end; its exit status."""
    name = "discriminator"
    interrupt = lifecycle.Interrupt().install()
    vocabulary = m3_data.given_vocabulary()
    groups = m3_data.groups(data_dir=None)
    models = m3_models.load(vocabulary)
    config = models.config

    mesh = shared_flags.mesh()
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    placed = m3_models.place_discriminator(mesh, models)
    train = jax.jit(
        functools.partial(m3.discriminator_step, config),
        in_shardings=(placed.sharding, batch_at),
        out_shardings=(placed.sharding, everywhere),
        donate_argnums=0,
    )
    judge = jax.jit(
        functools.partial(m3.predict, config),
        in_shardings=(placed.sharding.params, batch_at),
        out_shardings=everywhere,
    )

    agreed = m3_config.settings(vocabulary, groups)
    checkpoints = saved.Saved(name, agreed, m3_config.WINDOW.value)
    hello = m3_config.hello(name, agreed, checkpoints.steps)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(
            bridge.Listener(
                shared_flags.listening_socket(),
                hello,
                peer_timeout=shared_flags.PEER_TIMEOUT.value,
                reconnect_timeout=shared_flags.RECONNECT_TIMEOUT.value,
                tls=shared_flags.server_tls(),
                line=wan.from_string(shared_flags.WAN.value).down,
                log=lifecycle.say,
            )
        )
        links = _meet(len(groups), listener, stack)
        spec = m3.tokens_spec(config, shared_flags.BATCH_SIZE.value)
        pack = codecs.pack_ids(vocabulary.size)
        tokens = [
            link.receiver("tokens", spec, pack, sharding=batch_at) for link in links
        ]
        held_back = [
            link.receiver("held_back", spec, pack, sharding=batch_at) for link in links
        ]
        have = {link.peer.cluster: link.peer.checkpoints for link in links}
        start = saved.newest_of_all(
            {name: checkpoints.steps} | have, m3_config.WINDOW.value
        )
        for link in links:
            link.welcome(start)
        state, _ = checkpoints.restore(start, placed)
        record = progress.Progress(name, start, lambda: progress.traffic(links))

        def evaluate(step: int) -> None:
            judged = rtd.RtdAccumulator()
            for channel, group in zip(held_back, groups, strict=True):
                order = m3_data.held_back_order(group)
                for micro_batch, (language, _) in enumerate(order):
                    received = channel.recv(step, micro_batch)
                    judged.add(language, judge(state.params, received))
            record.evaluation(step, judged.report())

        if start == 0:
            evaluate(0)
        interrupt.is_graceful = True
        last, step = shared_flags.STEPS.value, start
        is_stopping = False
        while step < last:
            step += 1
            received = [channel.recv(step) for channel in tokens]
            state, metrics = train(state, received)
            jax.block_until_ready(metrics)
            asked = any(link.stop_step is not None for link in links)
            if not is_stopping and (asked or interrupt.requested):
                is_stopping = True
                last = pace.last_step_after_stop(step - 1, m3_config.WINDOW.value, last)
                lifecycle.say(f"{name}: stopping, all clusters save step {last}")
                for link in links:
                    link.stop(last)
            for link in links:
                link.step_done(step)
            record.step(step, metrics)
            if m3_config.is_evaluated(step):
                evaluate(step)
            if checkpoints.is_due(step):
                checkpoints.save(step, state)
        if start < step and step not in checkpoints.steps:
            checkpoints.save(step, state)
        ledgers = {link.peer.cluster: link.ledger for link in links}
        record.finish(step, {"ledgers": ledgers, "models": m3_models.describe(models)})
    if step >= shared_flags.STEPS.value:
        encoder = shared_flags.cluster_folder(name) / m3_models.ENCODER
        m3_models.export(encoder, models, vocabulary, state.params)
    return lifecycle.exit_status(step, interrupt)


def _meet(
    generators: int, listener: bridge.Listener, stack: contextlib.ExitStack
) -> list[bridge.Link]:
    """Waits for all generators, whichever comes first; their links in order."""
    deadline = time.monotonic() + shared_flags.CONNECT_TIMEOUT.value
    awaited = {f"generator:{index}" for index in range(generators)}
    links: dict[str, bridge.Link] = {}
    while awaited - links.keys():
        try:
            link = listener.accept(deadline - time.monotonic())
        except bridge.ConnectError:
            missing = ", ".join(sorted(awaited - links.keys()))
            raise bridge.ConnectError(
                f"{missing} did not come within"
                f" {shared_flags.CONNECT_TIMEOUT.value:g} s (--connect_timeout)"
            ) from None
        stack.enter_context(link)
        name = link.peer.cluster
        if name not in awaited or name in links:
            why = "here already" if name in links else f"not of {generators} generators"
            raise bridge.Mismatch(f"{name} came, but is {why}")
        links[name] = link
    return [links[f"generator:{index}"] for index in range(generators)]
