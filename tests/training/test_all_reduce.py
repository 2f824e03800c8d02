import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.models import activations
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import BATCH, REPLICATED
from nebula_jax.training import accumulate, all_reduce

B, LAYERS = 16, 3
RANDOM = np.random.RandomState(0)
BATCH_OF = {
    "x": RANDOM.randn(B, 4).astype(np.float32),
    "weight": RANDOM.randint(0, 4, B).astype(np.float32),
}
PARAMS = {
    "table": RANDOM.randn(4, 4).astype(np.float32),
    **{f"layer_{n}": RANDOM.randn(4, 4).astype(np.float32) for n in range(LAYERS)},
}


def loss(params, rows, number):
    """The part of a weighted mean of squares, of a few layers between tied tables."""
    hidden = rows["x"] @ params["table"]
    for layer in range(LAYERS):
        hidden = jnp.tanh(hidden @ params[f"layer_{layer}"])
    squares = jnp.sum((hidden @ params["table"].T) ** 2, axis=-1)
    weighted = jnp.sum(squares * rows["weight"]) / BATCH_OF["weight"].sum()
    number = jnp.zeros((), jnp.int32) if number is None else number
    rows = {"x": 2 * rows["x"], "number": jnp.full(len(squares), number)}
    return accumulate.Outcome(weighted, {"weight": jnp.sum(rows["x"])}, rows)


def compute(devices, micro_batches, when):
    """What `gradients` returns on so many devices, and the compiled program."""
    mesh = mesh_lib.make_mesh(jax.devices()[:devices])
    fn = functools.partial(
        all_reduce.gradients, loss, micro_batches=micro_batches, when=when
    )
    everywhere, rows = (
        jax.sharding.NamedSharding(mesh, spec) for spec in (REPLICATED, BATCH)
    )
    jitted = jax.jit(activations.on(mesh, fn), in_shardings=(everywhere, rows))
    compiled = jitted.lower(PARAMS, BATCH_OF).compile()
    given = jax.device_put((PARAMS, BATCH_OF), (everywhere, rows))
    return jax.device_get(compiled(*given)), compiled.as_text()


computed = functools.cache(compute)
LAYOUTS = [(2, 1), (4, 2)]


@pytest.mark.parametrize("when", all_reduce.WHEN)
@pytest.mark.parametrize(("devices", "micro_batches"), LAYOUTS)
def test_many_devices_have_the_gradient_of_the_batch(devices, micro_batches, when):
    (grads, outcome), _ = computed(devices, micro_batches, when)
    (want, whole), _ = computed(1, 1, "each")
    # Sums of 16 rows in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), grads, want)
    np.testing.assert_allclose(outcome.loss, whole.loss, rtol=1e-5)
    np.testing.assert_allclose(outcome.sums["weight"], whole.sums["weight"], rtol=1e-5)
    np.testing.assert_array_equal(outcome.rows["x"], BATCH_OF["x"] * 2)  # in order


@pytest.mark.parametrize(("devices", "micro_batches"), LAYOUTS)
def test_every_micro_batch_of_every_device_has_a_number(devices, micro_batches):
    """Keys are derived from it: two that draw alike would learn less."""
    (_, outcome), _ = computed(devices, micro_batches, "once")
    numbers = outcome.rows["number"].reshape(devices, -1, micro_batches)
    want = np.arange(devices * micro_batches).reshape(devices, 1, micro_batches)
    np.testing.assert_array_equal(numbers, np.broadcast_to(want, numbers.shape))


def sums(text):
    """How many all-reduces a program has inside loops, and outside."""
    everywhere, entry = (
        each.count(" all-reduce(") + each.count(" all-reduce-start(")
        for each in (text, text[text.index("\nENTRY ") :])
    )
    return everywhere - entry, entry


@pytest.mark.parametrize(
    ("when", "inside", "outside"), [("each", 1, 0), ("once", 0, 1)]
)
def test_gradients_are_added_up_as_often_as_is_promised(when, inside, outside):
    """In the loop over micro-batches, and outside of it."""
    _, text = computed(4, 2, when)
    assert sums(text) == (inside, outside)
    for kind in ("reduce-scatter", "all-gather", "all-to-all", "collective-permute"):
        assert f" {kind}" not in text


@pytest.mark.parametrize(
    ("fsdp", "model_parallel", "named"), [(2, 1, "fsdp=2"), (1, 2, "model_parallel=2")]
)
def test_parameters_that_are_split_cannot_be_added_up_by_each_device(
    fsdp, model_parallel, named
):
    mesh = mesh_lib.make_mesh(jax.devices()[:4], fsdp, model_parallel)
    all_reduce.check(B, 2, "each", mesh)
    with pytest.raises(errors.SettingsError, match=f"all_reduce=once .*{named}"):
        all_reduce.check(B, 2, "once", mesh)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(errors.SettingsError, match=r"16 rows .* 4 devices with 8"):
        compute(4, 8, "once")


def test_without_a_mesh_the_micro_batches_are_added_up_here():
    grads, _ = jax.jit(
        lambda: all_reduce.gradients(loss, PARAMS, BATCH_OF, 4, "once")
    )()
    want = computed(1, 1, "each")[0][0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), grads, want)
