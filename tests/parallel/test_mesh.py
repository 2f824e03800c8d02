import collections
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from jax.sharding import PartitionSpec

from nebula_jax import errors
from nebula_jax.models import transformer
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import BATCH, REPLICATED, RULES, Rule
from nebula_jax.training import m3, m3_steps

STEPS, ROWS, LENGTH = 2, 8, 16
LAYOUTS = [(1, 1, 1), (2, 2, 2), pytest.param((8, 1, 1), marks=pytest.mark.slow)]
"""Devices along data, fsdp and model."""
COLLECTIVES = (
    "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    "|collective-broadcast"
)


MODEL = transformer.Config(64, 1, 32, 8, 64, max_length=LENGTH, dropout=0.1)
STILL = dataclasses.replace(MODEL, dropout=0.0)  # sooner compiled
CONFIG = m3.Config(MODEL, STILL, steps=5, learning_rate=1e-3, warmup_steps=2)


def test_axes_are_data_fsdp_and_model():
    mesh = mesh_lib.make_mesh(jax.devices(), fsdp=2, model_parallel=2)
    assert mesh.shape == {"data": 2, "fsdp": 2, "model": 2}
    assert mesh_lib.replicas(mesh) == 4
    with pytest.raises(errors.NebulaError, match=r"model_parallel=3 .* 8 devices"):
        mesh_lib.make_mesh(jax.devices(), model_parallel=3)


@functools.cache
def init():
    """States of the two sides of M3, in the host's memory."""
    make = jax.jit(
        lambda: (m3.init_generator(CONFIG, 0, 0), m3.init_discriminator(CONFIG, 0))
    )
    return jax.device_get(make())


class Trained:
    """The two sides of M3 after some steps on a mesh."""

    def __init__(self, data, fsdp, model_parallel):
        devices = jax.devices()[: data * fsdp * model_parallel]
        mesh = mesh_lib.make_mesh(devices, fsdp, model_parallel)
        plans = [
            mesh_lib.sharded_init_from_arrays(mesh, lambda state=state: state)
            for state in init()
        ]
        self.states = [plan.init() for plan in plans]
        shapes = [plan.shapes for plan in plans]
        generator_step = mesh_lib.jit_step(
            functools.partial(m3_steps.generator_step, CONFIG),
            mesh,
            RULES,
            shapes[0],
            outputs=(BATCH, REPLICATED),
        )
        discriminator_step = mesh_lib.jit_step(
            functools.partial(m3_steps.discriminator_step, CONFIG),
            mesh,
            RULES,
            shapes[1],
        )
        ids = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
        tokens = m3.tokens_spec(CONFIG, ROWS)
        generator_step = generator_step.lower(shapes[0], ids).compile()
        discriminator_step = discriminator_step.lower(
            shapes[1], [tokens, tokens]
        ).compile()
        self.collectives = [
            collectives(each.as_text()) for each in (generator_step, discriminator_step)
        ]
        random = np.random.RandomState(0)
        for _ in range(STEPS):
            ids = random.randint(5, 64, (ROWS, LENGTH)).astype(np.int32)
            ids = jax.device_put(ids, mesh_lib.batch_sharding(mesh))
            self.states[0], tokens, _ = generator_step(self.states[0], ids)
            self.states[1], metrics = discriminator_step(
                self.states[1], [tokens, tokens]
            )
        self.metrics = jax.device_get(metrics)
        self.params = jax.device_get([state.params for state in self.states])


trained = functools.cache(Trained)


def collectives(text):
    """Kind -> shapes, such as f32[32,64], of the collectives of a compiled program."""
    found = collections.defaultdict(list)
    for line in text.splitlines():
        match = re.search(rf"= \(?(\S+?)\{{.* ({COLLECTIVES})(-start)?\(", line)
        if match:
            found[match.group(2)].append(match.group(1))
    return dict(found)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_eight_devices_compute_what_one_does(layout):
    found, one = trained(*layout), trained(*LAYOUTS[0])
    # Sums in another order: Adam turns rounding of tiny gradients into 1e-6 of a step
    # of 1e-3, dropout and sampling draw the same bits on any mesh.
    trees.assert_close(found.params, one.params, atol=1e-5)
    np.testing.assert_allclose(found.metrics["loss"], one.metrics["loss"], rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_has_the_collectives_it_needs_and_no_others(layout):
    _, fsdp, model_parallel = layout
    run = trained(*layout)
    for found, state in zip(run.collectives, run.states, strict=True):
        numbers, ids = {}, {}
        for kind, shapes in found.items():
            numbers[kind] = [each for each in shapes if each.startswith("f32")]
            ids[kind] = [each for each in shapes if not each.startswith("f32")]
        # Gradients, and sums over what is split.
        assert bool(numbers.pop("all-reduce", [])) == (max(layout) > 1)
        # Parameters that fsdp splits, for the forward pass and maybe again for the
        # backward one.
        split = gathered(state.params, fsdp, model_parallel)
        there = collections.Counter(numbers.pop("all-gather", []))
        # A sample's place among the parts of a vocabulary: a number for each part.
        of_samples = [shape for shape in there if shape not in split]
        assert len(of_samples) <= (model_parallel > 1)
        for shape in of_samples:
            assert elements(shape) <= ROWS * LENGTH
        for shape, count in split.items():
            assert count <= there[shape] <= 2 * count
        assert not any(numbers.values())
        if model_parallel == 1:  # rows of two generators are joined where they are
            assert not any(ids.values())
        assert all(
            elements(each) <= ROWS * LENGTH for each in itertools.chain(*ids.values())
        )


def gathered(params, fsdp, model_parallel):
    """Shape -> how many parameters have it once `fsdp` no longer splits them."""
    split = collections.Counter()
    for leaf in jax.tree.leaves(params):
        if fsdp > 1 and "fsdp" in leaf.sharding.spec:
            sizes = [
                size // (model_parallel if axis == "model" else 1)
                for size, axis in zip(leaf.shape, leaf.sharding.spec, strict=True)
            ]
            split[f"f32[{','.join(map(str, sizes))}]"] += 1
    return split


def elements(shape):
    """How many numbers f32[2,3] has."""
    return np.prod([int(each) for each in re.findall(r"\d+", shape.split("[")[1])])


def toy_step(weights, batch, scale):
    """A step with one state, two inputs and two outputs."""
    loss = jnp.mean(batch) * scale
    return weights + loss, batch * 2, loss


TOY_RULES = (Rule("", PartitionSpec("model")),)


def toy_mesh():
    return mesh_lib.make_mesh(jax.devices()[:4], model_parallel=2)


def toy_sharding(spec):
    return jax.sharding.NamedSharding(toy_mesh(), spec)


def test_a_jitted_step_puts_everything_where_it_is_said_to_be():
    split = toy_sharding(PartitionSpec("model"))
    step = mesh_lib.jit_step(
        toy_step,
        toy_mesh(),
        TOY_RULES,
        jnp.zeros(8),
        inputs=(BATCH, toy_sharding(REPLICATED)),
        outputs=(BATCH, REPLICATED),
    )
    weights = jax.device_put(jnp.arange(8.0), split)
    found, doubled, loss = step(weights, np.ones((4, 2), np.float32), np.float32(3))
    np.testing.assert_array_equal(found, np.arange(8.0) + 3)
    np.testing.assert_array_equal(doubled, np.full((4, 2), 2))
    assert found.sharding.spec == PartitionSpec("model")
    assert doubled.sharding.spec == PartitionSpec(("data", "fsdp"))
    assert loss.sharding.spec == PartitionSpec()
    assert weights.is_deleted()


def table(vocabulary):
    return {"word_embeddings": {"embedding": vocabulary}}


@pytest.mark.parametrize(
    "plan", [mesh_lib.sharded_init, mesh_lib.sharded_init_from_arrays]
)
def test_a_state_is_made_in_its_place(plan):
    mesh = toy_mesh()
    arrays = table(jnp.arange(32.0).reshape(8, 4))
    planned = plan(mesh, lambda: arrays)
    made = planned.init()
    trees.assert_same(made, arrays)
    assert jax.tree.map(lambda leaf: leaf.sharding, made) == planned.sharding
    assert planned.shapes == jax.eval_shape(lambda: arrays)
    jax.tree.map(lambda leaf: leaf.delete(), made)  # as a step does that donates it
    jax.tree.map(np.asarray, arrays)
