import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
import trees

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import masked_lm, transformer
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import BATCH, REPLICATED, RULES
from nebula_jax.training import bert, masking, optimizers, partition

V, L, B, STEPS = 64, 24, 16, 8
PAD = vocabularies.SPECIAL.pad
ENCODER = transformer.Config(V, 1, 16, 2, 32, L)
# Plain gradient descent, without clipping: the loss depends on the gradient's size too.
optimizers.BY_NAME["sgd"] = lambda rate, **_: optax.sgd(rate)  # no run has it
PLAIN = bert.Config(
    ENCODER,
    STEPS,
    all_reduce="each",
    optimizer="sgd",
    learning_rate=0.5,
    warmup=0.25,
    weight_decay=0.0,
    clip_norm=0.0,
)


def text(step):
    """A batch of which a model soon learns something: few words are frequent."""
    random = np.random.RandomState(step)
    ids = vocabularies.NUM_SPECIAL + random.zipf(1.6, (B, L)) % 40
    for row in range(B):
        ids[row, random.randint(3, 2 * L // 3) :] = PAD
    return ids.astype(np.int32)


def with_encoder(config, **fields):
    return dataclasses.replace(
        config, encoder=dataclasses.replace(config.encoder, **fields)
    )


ADAPTERS = dataclasses.replace(
    PLAIN,
    adapter_dim=4,
    trains="adapters_and_head",
    optimizer="adamw",
    learning_rate=0.02,
)
init = jax.jit(bert.init, static_argnums=0)


@functools.cache
def drawn():
    """Parameters that all begin with, those with adapters or without: compiled once."""
    state, frozen = init(ADAPTERS, 0)
    return jax.device_get(partition.merge(state.params, frozen))


class Trainer:
    """A step: (state, batch, its first row) -> (state, metrics)."""

    def __init__(self, config, devices, rows):
        mesh = mesh_lib.make_mesh(jax.devices()[:devices])
        params = drawn()
        plan = mesh_lib.sharded_init_from_arrays(
            mesh, lambda: bert.init(config, 0, params)[0]
        )
        self.init = plan.init
        jitted = mesh_lib.jit_step(
            functools.partial(bert.step, config),
            mesh,
            RULES,
            plan.shapes,
            inputs=(REPLICATED, BATCH, REPLICATED),
        )
        given = {}, text(0)[:rows], np.int32(0)
        self.compiled = jitted.lower(plan.shapes, *given).compile()

    def __call__(self, state, ids, first_row=0):
        return self.compiled(state, {}, ids, np.int32(first_row))


trainer = functools.cache(Trainer)  # by all arguments, or it compiles again


def train(config, devices=1, steps=STEPS):
    """Losses of the steps, the last metrics, and the parameters after them."""
    step = trainer(config, devices, B)
    state, losses = step.init(), []
    for number in range(steps):
        state, metrics = step(state, text(number))
        losses.append(metrics["loss"])
    return jax.device_get((np.array(jax.device_get(losses)), metrics, state.params))


trained = functools.cache(train)


ONCE = dataclasses.replace(PLAIN, all_reduce="once", micro_batches=2)


@pytest.mark.slow
def test_gradients_added_up_once_give_the_same_loss_curve():
    losses, metrics, params = train(ONCE, 2)
    want, wanted, wanted_params = trained(PLAIN)
    assert want[-1] < want[0] - 0.5  # there is a curve
    # Sums in another order, and what 8 steps make of their rounding.
    np.testing.assert_allclose(losses, want, atol=1e-5)
    trees.assert_close(params, wanted_params, atol=1e-5)
    assert metrics.keys() == wanted.keys()
    for name in ("tokens", "masked", "is_finite"):
        assert metrics[name] == wanted[name]
    assert metrics["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)


def test_gradients_are_added_up_as_the_setting_says():
    """In one sum of all of them, after the loop over micro-batches."""
    text = trainer(ONCE, 2, B).compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    found = re.findall(r"= (.*) all-reduce(?:-start)?\(", entry)
    scalars = [shape for shape in found if re.fullmatch(r"\w+\[\]", shape)]
    assert len(scalars) == 2  # tokens and masked tokens of the whole batch
    assert len(found) - len(scalars) == 1


@functools.partial(jax.jit, static_argnums=0)
def of_generator(config, params, rng, ids):
    """Electra's generator on the masks of a step."""
    rows = masking.mask_rows(
        masking.example_keys(rng, np.arange(len(ids))),
        ids,
        rate=config.mask_rate,
        policy=masking.POLICIES[config.mask_policy],
        vocab_size=V,
    )
    model = masked_lm.MaskedLM(config.encoder)
    return rows, model.apply(
        {"params": params}, rows.input_ids, ids != PAD, rows.positions
    )


def by_hand(config, params, rng, ids):
    """The oracle: sum of the losses, masked tokens, and those predicted, in numpy."""
    rows, logits = jax.device_get(of_generator(config, params, rng, ids))
    filled = rows.positions < L
    logits, originals = logits[filled].astype(np.float64), rows.originals[filled]
    lost = np.log(np.sum(np.exp(logits), -1)) - logits[range(len(logits)), originals]
    return np.sum(lost), len(lost), np.sum(np.argmax(logits, -1) == originals)


def test_the_loss_is_the_mean_over_masked_tokens():
    step = trainer(PLAIN, 1, B)
    state = step.init()
    for number in range(STEPS - 1):  # until some are predicted
        state, _ = step(state, text(number))
    rng = jax.random.split(state.key())[0]
    ids = text(0)
    lost, masked, correct = by_hand(PLAIN, jax.device_get(state.params), rng, ids)
    _, metrics = step(state, ids)
    assert metrics["loss"] == pytest.approx(lost / masked, rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(correct / masked, rel=1e-6)
    assert 0 < correct < masked == metrics["masked"]
    assert metrics["tokens"] == np.sum(ids != PAD)


evaluate = jax.jit(bert.evaluate, static_argnums=0)


def test_an_evaluation_is_a_sum_over_rows_without_dropout():
    config = with_encoder(PLAIN, dropout=0.5)
    params = trained(PLAIN)[2]
    key = functools.partial(jax.random.key, 3)
    ids = text(5)
    ids[-2:] = PAD  # a batch need not be full
    found = jax.device_get(evaluate(config, params, key(), ids))
    np.testing.assert_allclose(found, by_hand(PLAIN, params, key(), ids), rtol=1e-5)
    halves = [
        jax.device_get(evaluate(config, params, key(), ids[first : first + 8], first))
        for first in (0, 8)
    ]
    added = jax.tree.map(np.add, *halves)
    np.testing.assert_allclose(added, found, rtol=1e-5)


def test_clusters_with_parts_of_a_batch_have_its_gradient():
    """Gradients of two halves, weighted by their masked tokens: the data parallel step.
    (The loss of each half is a mean over its own tokens.)"""
    moved, weights, ids = [], [], text(0)
    for first, rows in ((0, B), (0, 8), (8, 8)):
        step = trainer(PLAIN, 1, rows)
        start = step.init().at_step(STEPS // 2)  # the rate of step 0 is 0
        before = jax.device_get(start.params)
        after, metrics = step(start, ids[first : first + rows], first)
        moved.append(jax.tree.map(np.subtract, jax.device_get(after.params), before))
        weights.append(float(metrics["masked"]))
    assert weights[0] == weights[1] + weights[2]
    jax.tree.map(
        lambda whole, a, b: np.testing.assert_allclose(
            whole, (a * weights[1] + b * weights[2]) / weights[0], atol=1e-6
        ),
        *moved,
    )


def test_only_adapters_and_the_head_train_if_that_is_wanted():
    state, frozen = init(ADAPTERS, 0)
    assert state.params.keys() == {"adapter_0", "mlm_head"}
    assert frozen.keys() == {"embeddings", "encoder"}
    moments = jax.tree.leaves(state.opt_state)
    assert sum(leaf.size for leaf in moments) == 2 + 2 * sum(
        leaf.size for leaf in jax.tree.leaves(state.params)
    )
    before = jax.device_get(state.params)
    step = jax.jit(functools.partial(bert.step, ADAPTERS))
    for number in range(STEPS):
        # The rate of step 0.
        state = state.replace(step=np.int32(0))
        state, metrics = step(state, frozen, text(0), np.int32(0))
        if not number:
            first = float(metrics["loss"])
    assert metrics["loss"] < first
    now, then = (each["adapter_0"]["up"]["kernel"] for each in (state.params, before))
    assert np.all(jax.device_get(now) != then)


def test_a_run_begins_with_the_parameters_given():
    given = trained(PLAIN)[2]
    encoder = {part: given[part] for part in ("embeddings", "encoder")}
    encoder["rtd_head"] = {"kernel": np.zeros(3)}  # of another model: not used
    state, frozen = bert.init(ADAPTERS, 0, encoder)
    found = jax.device_get(partition.merge(state.params, frozen))
    assert found.keys() == drawn().keys()
    for part, params in found.items():
        want = given if part in encoder else drawn()
        trees.assert_same(params, want[part])


def test_dropout_is_drawn_anew_in_each_cluster():
    """All tokens are masked, whatever their row, so nothing else can differ."""
    config = dataclasses.replace(PLAIN, mask_rate=1.0, mask_policy="mask")
    step = trainer(with_encoder(config, dropout=0.5), 1, B)
    losses = [
        float(step(step.init(), text(0), first)[1]["loss"]) for first in (0, 0, 16)
    ]
    assert losses[0] == losses[1] != losses[2]
