"""Keeping clusters in step (section 3.3).

Steps count from 1. After optimisation step t the discriminator returns a step token,
the paper's "small tensor". A generator may begin step t once the token of step
t - 1 - window has come: with window 0 the two take turns, with more they overlap, and
the generator's samples never run further ahead than that.
"""


def token_needed(step: int, window: int) -> int:
    """The latest step whose token must be there before `step` begins.

    Args:
      step: the step that wants to begin, 1 and up.
      window: how many steps a generator may be ahead.

    Returns:
      A step; 0 or less means that none is needed.
    """
    return step - 1 - window


def last_step_after_stop(done: int, window: int, total: int) -> int:
    """Where a run ends that is asked to stop while `done` steps have their token.

    A generator can have begun step done + window + 1, and nothing later: every cluster
    can still end exactly there, and save the same step.

    Args:
      done: latest step with a token.
      window: how many steps a generator may be ahead.
      total: where the run ends anyway.
    """
    return min(done + window + 1, total)
