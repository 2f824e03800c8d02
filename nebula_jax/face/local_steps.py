"""Local steps on a model of your own: a replica in each cluster, averaged by rounds."""

import dataclasses
import re
from typing import Any

from nebula_jax import errors
from nebula_jax.face import run as run_lib
from nebula_jax.parallel.local_steps import settings as settings_lib
from nebula_jax.runtime import local_steps as local_steps_lib
from nebula_jax.runtime.connect import all_clusters


def local_steps(
    run: run_lib.Run, peers: all_clusters.Peers, params: Any, **settings: Any
) -> local_steps_lib.Rounds:
    """Begins local steps: every cluster trains a replica, and rounds average them.

        with run.meet() as peers:
            rounds = nebula.local_steps(
                run, peers, state.params, inner_steps=100, codec="e3m0(256)"
            )
            state, rounds = run.restore(state, rounds)
            rows = rounds.share.rows(BATCH)
            for step, mine in run.batches(lambda step: batch(step)[rows]):
                state = state.apply(grads(state.params, mine))
                state = state.replace(params=rounds.after(step, state.params))
                run.done(step, (state, rounds))

    The optimizer of the inner steps is the loop's own. A stop of one cluster stops all
    after the same step, and checkpoints fall where no message is in flight.

    Args:
      run: of this cluster.
      peers: of `run.meet`.
      params: any pytree of arrays: those of step 0, in every cluster the same, also
        where the run goes on from a checkpoint.
      settings: `inner_steps`, and what else Settings (in `parallel/local_steps`) has:
        fragments, delay, codec, is_trained (for adapters alone, `lambda path: "lora" in
        path`), mixing, learning_rate and momentum of the outer step, shares,
        is_robust, quorum, grace.

    Returns:
      Rounds, which `run.restore` and `run.done` take with the state.

    Raises:
      errors.SettingsError: at what cannot be; begins with a setting's name.
    """
    known = [each.name for each in dataclasses.fields(settings_lib.Settings)]
    for name in settings:
        if name not in known:
            raise errors.SettingsError(
                f"local_steps has no setting {name}; there are {', '.join(known)}"
            )
    given = settings_lib.Settings(**settings)
    try:
        run.rounds = local_steps_lib.begin(run.context, peers, params, given)
    except errors.SettingsError as error:
        # As said of a call in the script, so that no flag of this name is blamed.
        subject = re.match(r"\w*", str(error))
        dot = "." if subject is not None and subject[0] in known else ": "
        raise type(error)(f"local_steps{dot}{error}") from None
    return run.rounds
