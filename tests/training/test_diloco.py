"""Local steps against vectors computed by hand, NumPy, and data parallelism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.training import diloco


def config(**settings):
    return diloco.Config(**{"inner_steps": 30, **settings})


def fragment(*values: float) -> diloco.Fragment:
    return {"w": jnp.asarray(values, jnp.float32)}


def test_nesterov_by_hand():
    # lr 0.5, momentum 0.5; two clusters; the mean of the deltas is 1, then 2, then -1.
    settings = config(learning_rate=0.5, momentum=0.5)
    outer = diloco.begin(settings, fragment(10.0))
    found = []
    for number, (one, two) in enumerate([(0.0, 2.0), (3.0, 1.0), (-4.0, 2.0)]):
        deltas = [fragment(one), fragment(two)]
        outer = diloco.outer_step(
            settings, outer, deltas, [0.5, 0.5], is_first=not number
        )
        found.append(float(outer.anchor["w"][0]))
    # b = 1, 2.5, 0.25. The first step is plain: 10 - 0.5 * 1. Then
    # 9.5 - 0.5 (2 + 0.5 * 2.5) = 7.875, and 7.875 - 0.5 (-1 + 0.5 * 0.25) = 8.3125.
    assert found == [9.5, 7.875, 8.3125]


def test_a_median_norm_bounds_what_one_cluster_does():
    usual = [{"w": jnp.full(4, each)} for each in (0.5, 1.0)]
    deltas = [*usual, {"w": jnp.full(4, -1e6)}]
    norms = [diloco.norm(jax.device_get(each)) for each in deltas]
    assert norms == [1.0, 2.0, 2e6]
    config = diloco.Config(
        inner_steps=1, learning_rate=1.0, momentum=0.0, is_robust=True
    )
    outer = diloco.begin(config, {"w": jnp.zeros(4)})
    weights = diloco.robust_weights([1 / 3] * 3, norms)
    moved = diloco.outer_step(config, outer, deltas, weights, is_first=True)
    # (0.5 + 1 - 1) / 3: the third counts as one of the median norm, 2.
    np.testing.assert_allclose(moved.anchor["w"], -0.5 / 3, rtol=1e-3)


def test_an_outer_step_rounds_every_operation_by_itself(monkeypatch):
    """As NumPy does, on any device: a fused multiplication and addition would not. As a
    run compiles it: other tests are compiled without what fuses them."""
    options = {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
    step = diloco._outer_step.__wrapped__
    optimized = jax.jit(step, static_argnums=0, compiler_options=options)
    monkeypatch.setattr(diloco, "_outer_step", optimized)
    settings = config()
    random = np.random.default_rng(0)
    anchor, *deltas = (random.normal(size=1000).astype(np.float32) for _ in range(4))
    outer = diloco.begin(settings, {"w": jnp.asarray(anchor)})
    momentum, rate = np.float32(0.9), np.float32(-0.7)
    expected, trace = anchor, np.zeros_like(anchor)
    weights = [5 / 23, 7 / 23, 11 / 23]
    for number in range(3):
        outer = diloco.outer_step(
            settings,
            outer,
            [{"w": jnp.asarray(each)} for each in deltas],
            weights,
            is_first=not number,
        )
        mean = deltas[0] * np.float32(weights[0])
        for delta, weight in zip(deltas[1:], weights[1:], strict=True):
            mean = mean + delta * np.float32(weight)
        trace = mean + momentum * trace
        update = rate * (mean + momentum * trace)
        if not number:
            update = update * np.float32(1 / 1.9)
        expected = expected + update
        assert np.array_equal(outer.anchor["w"], expected)


def test_denormals_are_zero_on_every_device():
    settings = config(learning_rate=1.0, momentum=0.0)
    outer = diloco.begin(settings, fragment(2.0**-126 * 1.5))
    outer = diloco.outer_step(settings, outer, [fragment(2.0**-126)], [1.0], False)
    assert outer.anchor["w"].tolist() == [0.0]


def test_the_schedule_sends_each_fragment_once_in_inner_steps():
    settings = config(inner_steps=12, fragments=3, delay=3)
    sent = {step: settings.sent_after(step) for step in range(1, 37)}
    assert {step: each for step, each in sent.items() if each is not None} == {
        **{4: 1, 8: 2, 12: 0, 16: 1, 20: 2, 24: 0},
        **{28: 1, 32: 2, 36: 0},
    }
    for step, each in sent.items():
        assert settings.applied_after(step + 3) == each
    assert settings.sent_after(0) is None
    assert settings.applied_after(3) is None  # nothing was sent after step 0


def test_checkpoints_wait_for_what_is_in_flight():
    settings = config(inner_steps=10, fragments=2, delay=3)
    under_way = [step for step in range(1, 26) if settings.is_in_flight(step)]
    assert under_way == [5, 6, 7, 10, 11, 12, 15, 16, 17, 20, 21, 22, 25]
    saved = [step for step in range(1, 26) if settings.is_saved_after(step, 6)]
    assert saved == [8, 13, 18, 24]  # due after 6, 12, 18, 24
    every = [step for step in range(1, 26) if settings.is_saved_after(step, 1)]
    assert every == [step for step in range(1, 26) if step not in under_way]
    at_once = config(inner_steps=10)
    assert not at_once.is_in_flight(10)
    assert [step for step in range(31) if at_once.is_saved_after(step, 10)] == [
        10,
        20,
        30,
    ]


def test_the_next_round():
    settings = config(inner_steps=10, fragments=2)
    assert settings.next_sent(1) == (5, 1)
    assert settings.next_sent(5) == (5, 1)
    assert settings.next_sent(6) == (10, 0)


@pytest.mark.parametrize(
    ("step", "last"),
    [
        (3, [(3, 0), (3, 1)]),
        (4, [(4, 1), (4, 0)]),  # the one of fragment 1 is under way
        (6, [(4, 1), (6, 0), (6, 1)]),
        (7, [(7, 0), (7, 1)]),  # it was applied after this step
        (8, [(8, 0), (8, 1)]),
        (10, [(8, 0), (10, 0), (10, 1)]),
    ],
)
def test_at_the_end_each_fragment_has_a_last_round(step, last):
    settings = diloco.Config(inner_steps=8, fragments=2, delay=3)
    assert settings.last_rounds(step) == last


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"inner_steps": 0}, "inner_steps"),
        ({"fragments": 0}, "fragments"),
        ({"fragments": 31}, "fragments"),
        ({"delay": 30}, "delay"),
        ({"fragments": 4, "delay": 7}, "delay"),
        ({"delay": -1}, "delay"),
        ({"mixing": 1.0}, "mixing"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_settings_that_cannot_be(settings, field):
    with pytest.raises(errors.SettingsError, match=f"^{field} "):
        config(**settings)


PARAMS = {
    "embeddings": {"word": jnp.zeros((3, 2))},
    "encoder": {f"layer_{layer}": {"kernel": jnp.zeros(2)} for layer in range(4)},
    "adapter_1": {"up": jnp.zeros(1)},
    "mlm_head": {"bias": jnp.zeros(3)},
}


def test_leaves_are_parted_in_order_and_evenly_by_size():
    assert diloco.places(PARAMS, 2) == {
        "adapter_1/up": 0,
        "embeddings/word": 0,
        "encoder/layer_0/kernel": 0,
        "encoder/layer_1/kernel": 1,
        "encoder/layer_2/kernel": 1,
        "encoder/layer_3/kernel": 1,
        "mlm_head/bias": 1,
    }
    everything = diloco.places(PARAMS, 1)
    (one,) = diloco.split(PARAMS, everything)
    assert len(one) == len(everything) == len(jax.tree.leaves(PARAMS))
    for count in range(1, 8):  # whatever one leaf weighs, each has another
        assert set(diloco.places(PARAMS, count).values()) == set(range(count))
    with pytest.raises(errors.SettingsError, match="fragments=8: there are 7 arrays"):
        diloco.places(PARAMS, 8)


def test_a_function_of_paths_parts_by_number_or_by_name():
    by_name = diloco.places(PARAMS, lambda path: path.split("/")[0])
    assert [by_name[path] for path in ("adapter_1/up", "mlm_head/bias")] == [0, 3]
    by_number = diloco.places(PARAMS, lambda path: int("layer" in path))
    one, two = diloco.split(PARAMS, by_number)
    assert sorted(one) == ["adapter_1/up", "embeddings/word", "mlm_head/bias"]
    assert len(two) == 4
    with pytest.raises(errors.SettingsError, match="every number from 0 on"):
        diloco.places(PARAMS, lambda path: 2 * int("layer" in path))


def test_what_does_not_train_is_in_no_fragment():
    params = {**PARAMS, "step": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}
    assert diloco.places(params, 2) == diloco.places(PARAMS, 2)
    adapters = diloco.places(params, 1, lambda path: path.startswith("adapter"))
    assert adapters == {"adapter_1/up": 0}
    new = diloco.replace(params, {"adapter_1/up": jnp.ones(1)})
    assert new["step"] is params["step"]
    with pytest.raises(errors.SettingsError, match="no floating-point array"):
        diloco.places(params, 1, lambda path: path == "step")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"scale": 1.0}, "the leaf scale is of the type float"),
        ({"act": jax.nn.relu}, "the leaf act is of the type .*equinox"),
        ({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, "two leaves have the path a/b"),
        ({"w": jnp.ones(1, jnp.complex64)}, "the leaf w is complex"),
    ],
)
def test_leaves_that_cannot_cross_are_named(params, words):
    with pytest.raises(errors.SettingsError, match=words):
        diloco.places(params)


def test_narrow_parameters_have_an_anchor_of_float32():
    """In bfloat16 an outer step of 1/1000 of a value would be none."""
    settings = config(learning_rate=1.0, momentum=0.0, mixing=0.0)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    outer = diloco.begin(settings, params)
    delta = diloco.outer_gradient(outer.anchor, params)
    assert delta["w"].dtype == outer.anchor["w"].dtype == jnp.float32
    small = {"w": jnp.full(2, 1e-3)}
    for _ in range(8):
        outer = diloco.outer_step(settings, outer, [small], [1.0], False)
    after = diloco.replace(params, diloco.mix(settings, params, outer.anchor))
    assert after["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(outer.anchor["w"], 0.992, atol=1e-6)
    assert float(after["w"][0]) == 0.9921875


def test_mixing():
    own, anchor = fragment(4.0), fragment(8.0)
    mixed = diloco.mix(config(mixing=0.25), own, anchor)
    assert mixed["w"].tolist() == [7.0]
    copied = diloco.mix(config(mixing=0.0), own, anchor)
    assert copied["w"].tolist() == [8.0]
    assert copied["w"] is not anchor["w"]  # a step uses up the parameters


def test_digests_differ_by_a_bit_and_by_name():
    one = diloco.digest(fragment(1.0, 2.0))
    assert len(one) == 32
    assert one == diloco.digest({"w": np.asarray([1.0, 2.0], np.float32)})
    assert one != diloco.digest(fragment(1.0, np.nextafter(np.float32(2), 3)))
    assert one != diloco.digest({"v": np.asarray([1.0, 2.0], np.float32)})


def test_the_fingerprint_is_of_names_shapes_dtypes_and_fragments():
    parts = diloco.split(PARAMS, diloco.places(PARAMS, 2))
    known = diloco.fingerprint(parts)
    specs = jax.eval_shape(lambda: parts)
    assert diloco.fingerprint(specs) == known
    assert diloco.fingerprint(parts[::-1]) != known
    other = [parts[0], {**parts[1], "mlm_head/bias": jnp.zeros(4)}]
    assert diloco.fingerprint(other) != known
