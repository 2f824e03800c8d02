"""What crosses between a student and each of its teachers, and in which step.

B rows, L length, M slots for masked pieces of a row, K pieces of an answer.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from experiments.students import config
from nebula_jax import errors
from nebula_jax.communication import codecs
from nebula_jax.training import distillation


def specs(settings: config.Settings, vocab_size: int, codec: str) -> tuple[Any, Any]:
    """Returns spec and codec of a question, and of an answer.

    `codec` is of log-probabilities. Raises errors.SettingsError if it does not fit, or
    has a state: no checkpoint would have it, and a run that resumes would come to other
    numbers.
    """
    rows, length = settings.batch_size, settings.max_length
    question = distillation.Question(
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.ShapeDtypeStruct((rows, length), jnp.bool_),
    )
    shape = (rows, settings.slots, settings.top_k)
    answer = distillation.Answer(
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    pack = codecs.pack_ids(vocab_size)
    try:
        packed = codecs.chain(pack, codecs.from_string(codec))
        has_state = bool(jax.tree.leaves(jax.eval_shape(lambda: packed.init(answer))))
    except ValueError as error:
        raise errors.SettingsError(f"codec={codec}: {error}") from None
    if has_state:
        raise errors.SettingsError(
            f"codec={codec}: it keeps a state, which distill does not save; take one"
            " without, such as fp16 or int8(64)"
        )
    return (question, pack), (answer, packed)


def check_answer(answered: distillation.Answer) -> None:
    """Raises ValueError at a log-probability that is none; the codec checks pieces."""
    if not bool(jnp.all(answered.log_probs < math.inf)):
        raise ValueError("a log-probability of it is NaN or infinite")


def to_ask(step: int, first: int, last: int) -> range:
    """Returns the steps whose questions cross in a step: the next one.

    Both sides know them. In the first step of a process it is that one too, since what
    was asked ahead before a resume is asked again.
    """
    return range(step + (step > first), min(step + 1, last) + 1)
