"""The discriminator of M3: receive from every generator, step, send the step token."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax

from experiments import clusters, m3_setup, progress, saved
from nebula_jax.communication import bridge, codecs, frames, wan
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pace
from nebula_jax.training import m3


def run() -> int:
    """Trains the discriminator to the end; its exit status."""
    name = "discriminator"
    interrupt = clusters.Interrupt().install()
    vocabulary = m3_setup.given_vocabulary()
    groups = m3_setup.groups(data_dir=None)
    config = m3_setup.config(vocabulary)

    mesh = clusters.mesh()
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    placed = saved.placed(
        mesh, functools.partial(m3.init_discriminator, config, clusters.SEED.value)
    )
    train = jax.jit(
        functools.partial(m3.discriminator_step, config),
        in_shardings=(placed.sharding, batch_at),
        out_shardings=(placed.sharding, everywhere),
        donate_argnums=0,
    )
    judge = jax.jit(
        functools.partial(m3.judge, config),
        in_shardings=(placed.sharding.params, batch_at),
        out_shardings=everywhere,
    )

    agreed = m3_setup.settings(vocabulary, groups)
    checkpoints = saved.Saved(name, agreed)
    hello = m3_setup.hello(name, agreed, checkpoints.steps)
    with contextlib.ExitStack() as stack:
        links = _meet(len(groups), hello, stack)
        spec = m3.tokens_spec(config, clusters.BATCH_SIZE.value)
        pack = codecs.pack_ids(vocabulary.size)
        tokens = [link.receiver("tokens", spec, pack, batch_at) for link in links]
        held_back = [link.receiver("held_back", spec, pack, batch_at) for link in links]
        start = _newest_of_all(
            [checkpoints.steps, *(link.peer.checkpoints for link in links)]
        )
        state, _ = checkpoints.restore(start, placed)
        for link in links:
            link.welcome(start)
        record = progress.Progress(name, start, lambda: progress.traffic(links))

        def evaluate(step: int) -> None:
            judged = m3_setup.Judged()
            for channel, group in zip(held_back, groups, strict=True):
                for micro_batch, language in enumerate(m3_setup.held_back_order(group)):
                    received = channel.recv(step, micro_batch)
                    judged.add(language, judge(state.params, received))
            record.evaluation(step, judged.report())

        if start == 0:
            evaluate(0)
        interrupt.is_graceful = True
        last, step = clusters.STEPS.value, start
        is_stopping = False
        while step < last:
            step += 1
            received = [channel.recv(step) for channel in tokens]
            state, metrics = train(state, received)
            jax.block_until_ready(metrics)
            asked = any(link.stop_step is not None for link in links)
            if not is_stopping and (asked or interrupt.requested):
                is_stopping = True
                last = pace.last_step_after_stop(step - 1, clusters.WINDOW.value, last)
                clusters.say(f"{name}: stopping, all clusters save step {last}")
                for link in links:
                    link.stop(last)
            for link in links:
                link.step_done(step)
            record.step(step, metrics)
            if m3_setup.is_evaluated(step):
                evaluate(step)
            if checkpoints.is_due(step):
                checkpoints.save(step, state)
        if start < step and step not in checkpoints.steps:
            checkpoints.save(step, state)
        ledgers = {link.peer.cluster: link.ledger for link in links}
        record.finish(step, {"ledgers": ledgers})
    return clusters.exit_status(step, interrupt)


def _meet(
    generators: int, hello: frames.Hello, stack: contextlib.ExitStack
) -> list[bridge.Link]:
    """Waits for all generators, whichever comes first; their links in order."""
    awaited = {f"generator:{index}" for index in range(generators)}
    links: dict[str, bridge.Link] = {}
    with clusters.listening_socket() as listening:
        while awaited - links.keys():
            try:
                link = bridge.accept(
                    listening,
                    hello,
                    timeout=clusters.CONNECT_TIMEOUT.value,
                    peer_timeout=clusters.PEER_TIMEOUT.value,
                    tls=clusters.server_tls(),
                    line=wan.from_string(clusters.WAN.value),
                    log=clusters.say,
                )
            except bridge.ConnectError as error:
                missing = ", ".join(sorted(awaited - links.keys()))
                raise bridge.ConnectError(f"{missing} missing: {error}") from None
            stack.enter_context(link)
            name = link.peer.cluster
            if name not in awaited or name in links:
                why = (
                    "here already"
                    if name in links
                    else f"not of {generators} generators"
                )
                raise bridge.Mismatch(f"{name} came, but is {why}")
            links[name] = link
    return [links[f"generator:{index}"] for index in range(generators)]


def _newest_of_all(saved_steps: Sequence[Any]) -> int:
    """The newest step that every cluster can go on from; 0 for the beginning."""
    return max(set.intersection(*({0, *steps} for steps in saved_steps)))
