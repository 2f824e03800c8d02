"""Nebula-JAX: local steps in a mesh or around a hub, as a variant says."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nebula_jax as nebula
from scripts.peers import task as task_lib

OUTER = {"learning_rate": 0.7, "momentum": 0.9, "mixing": 0.0}
VARIANTS = {  # name -> settings of local steps, and the hub
    "mesh float32": {"codec": "identity"},
    "hub float32": {"codec": "identity", "hub": "replica:0"},
    # All are in a round that come, and whoever is away holds up none.
    "hub quorum": {
        "codec": "identity",
        "hub": "replica:0",
        "quorum": 1,
        "grace": 30.0,
    },
    "mesh e3m0": {"codec": "e3m0(256)"},
    "streaming e3m0": {
        "codec": "e3m0(256)",
        "fragments": 2,
        "delay": 4,
        "mixing": 0.5,
    },
}

GELU = functools.partial(jax.nn.gelu, approximate=False)


def mean_loss(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns the mean loss, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    return losses.mean()


def loss_of(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    """Returns the mean loss of rows [B, CONTEXT + 1], in nats."""
    return mean_loss(task_lib.logits(GELU, params, rows), rows[:, -1])


def replica(task: task_lib.Task, run: nebula.Run) -> None:
    """Trains a replica."""
    log, settings = task_lib.Log(task), OUTER | VARIANTS[task.variant]
    grads_of = jax.jit(jax.grad(loss_of))
    params = {name: jnp.asarray(value) for name, value in task.parameters().items()}
    state = nebula.state(params, optax.adamw(task.rate, weight_decay=1e-4))
    hub, may_return = settings.pop("hub", ""), "quorum" in settings
    with run.meet(hub=hub, may_return=may_return) as peers:
        rounds = nebula.local_steps(
            run, peers, state.params, inner_steps=task.inner_steps, **settings
        )
        state, rounds = run.restore(state, rounds)
        for step, mine in run.batches(task.rows):
            jax.block_until_ready(state.params)  # so that the last update is not in it
            with log.computing():
                grads = jax.block_until_ready(grads_of(state.params, mine))
            state = state.apply(grads)
            state = state.replace(params=rounds.after(step, state.params))
            if step % task.inner_steps == 0:
                jax.block_until_ready(state.params)
                log.round(step // task.inner_steps)
            run.done(step, (state, rounds))
    held_out = np.array_split(task.held_out(), 8)
    parts = [float(loss_of(state.params, part)) for part in held_out]
    log.end(float(np.mean(parts)))


def start(
    task: task_lib.Task, cluster: str, roles: dict[str, Any], checkpoint_every: int
) -> None:
    """Trains as `cluster`, one of two, without TLS, as the others do.

    `roles` are as of `nebula.main`, but take the task first; checkpoints are in steps.
    """
    sys.argv[1:] = [
        f"--cluster={cluster}",
        f"--peer={task.root}:7070" if task.worker else f"--listen={task.root}:7070",
        "--tls=off",
        "--reconnect_timeout=5",  # as whoever ends is started again
        f"--steps={task.steps}",
        f"--checkpoint_every={checkpoint_every}",
        f"--workdir={task.folder}/run",
    ]
    nebula.main({name: functools.partial(fn, task) for name, fn in roles.items()})


def train(task: task_lib.Task) -> None:
    """Trains as one of two replicas."""
    every = task.inner_steps if task.saves else task.steps
    start(task, f"replica:{task.worker}", {"replica:*": replica}, every)
