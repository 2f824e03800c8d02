"""Trainers of two labs that exchange tensors over their switches."""

import concurrent.futures

import jax
import numpy as np
from two_labs import settings

from nebula_jax import errors
from nebula_jax.communication import codec
from nebula_jax.communication.wire import frames
from nebula_jax.federation import trainer_keys
from nebula_jax.runtime.connect import all_clusters

NAMES = ["discriminator", "generator:0"]
SPEC = jax.ShapeDtypeStruct((4, 8), np.float32)


def hello(cluster):
    return frames.Hello(cluster, "0.1", {})


def values(step):
    return np.full(SPEC.shape, step, np.float32)


def generate(lab, steps, received, gate=lambda step: None, **more):
    """A generator: sends a tensor a step, waits for its token."""
    with all_clusters.connected(
        settings(lab, **more), hello("generator:0"), NAMES
    ) as peers:
        (link,) = peers.links.values()
        tokens = link.sender("tokens", SPEC, codec.identity())
        assert link.wait_for_welcome(20.0) == 0
        for step in range(1, steps + 1):
            gate(step)
            tokens.send(step, jax.device_put(values(step)))
            link.wait_for_step(step)
            received.append(step)


def discriminate(lab, steps, received, **more):
    """A discriminator: receives, answers with the token."""
    with all_clusters.connected(
        settings(lab, **more), hello("discriminator"), NAMES
    ) as peers:
        (link,) = peers.links.values()
        tokens = link.receiver("tokens", SPEC, codec.identity())
        link.welcome(0)
        for step in range(1, steps + 1):
            received.append(np.asarray(tokens.recv(step))[0, 0])
            link.step_done(step)


def run(
    listening,
    dialing,
    steps=20,
    gate=lambda step: None,
    seconds=60,
    peers=("", ""),
    **more,
):
    """Runs both to their end; returns what the discriminator received, and errors."""
    tokens, failed = [], []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(discriminate, listening, steps, tokens, peer=peers[0], **more),
            pool.submit(generate, dialing, steps, [], gate, peer=peers[1], **more),
        ]
        for each in ends:
            try:
                each.result(seconds)
            except errors.NebulaError as error:
                failed.append(error)
    return tokens, failed


def exchange(listening, dialing, steps=20, **more):
    """Runs both, and checks that every step came, in order, without an error."""
    tokens, failed = run(listening, dialing, steps, **more)
    assert not failed
    assert tokens == list(range(1, steps + 1))


def name_of(lab):
    return lab.switch.state.lab


def exchange_between(listening, dialing, steps=20, **more):
    """The same of two labs of several: a trainer of each names the other's."""
    peers = name_of(dialing), name_of(listening)
    exchange(listening, dialing, steps, peers=peers, **more)


def rotate(lab):
    """Replaces the certificates of a lab, as `nebula rotate` does."""
    lab.run(lab.switch.upkeep.rotate())
    trainer_keys.renew(lab.folder)
