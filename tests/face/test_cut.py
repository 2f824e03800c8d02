"""A chain of any length, cut, trains as the uncut model does."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees

import nebula_jax as nebula
from nebula_jax.communication import loopback
from nebula_jax.face import cut

MICRO_BATCHES, ROWS, WIDTH = 3, 4, 6
KEY = jax.random.key(3)
SGD = optax.sgd(0.5)


def layer(params, h, drop):
    """One layer with dropout by the key, so that keys count too."""
    kept = 1.0 if drop is None else jax.random.bernoulli(drop, 0.8, h.shape)
    return jnp.tanh(h @ params["kernel"]) * kept


def front(params, batch, rng):
    return layer(params, batch["x"], rng)


def middle(params, h, batch, rng):
    return layer(params, h, rng) + 0.1 * batch["x"].sum()


def back(params, h, batch, rng):
    error = layer(params, h, None) - batch["y"]
    return jnp.mean(error**2), {"largest": jnp.max(jnp.abs(error))}


def init(part):
    key = jax.random.fold_in(jax.random.key(0), part)
    return {"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / 2}


def batches(step):
    random = np.random.default_rng(step)
    return [
        {name: random.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}
        for _ in range(MICRO_BATCHES)
    ]


def whole_loss(params, step, parts):
    """The uncut model, micro-batch by micro-batch with their keys."""
    total = 0.0
    for number, batch in enumerate(batches(step)):
        rng = jax.random.fold_in(jax.random.fold_in(KEY, step), number)
        h = front(params[0], batch, rng)
        for each in params[1 : parts - 1]:
            h = middle(each, h, batch, rng)
        total += back(params[-1], h, batch, rng)[0] / MICRO_BATCHES
    return total


@functools.cache  # they compile once for all tests
def made(parts, **settings):
    """The parts of a chain, and the shapes of what crosses after each."""
    halves = [cut.front(front, **settings)]
    halves += [cut.middle(middle, **settings) for _ in range(parts - 2)]
    halves.append(cut.back(back, **settings))
    specs = [cut.spec(front, init(0), batches(1)[0])]
    for number in range(1, parts - 1):
        specs.append(cut.spec(middle, init(number), specs[-1], batches(1)[0]))
    return halves, specs


def opened(halves, specs, seconds=60.0):
    """Opens all lines of a chain in one process."""
    ends = [loopback.ends(seconds=seconds) for _ in specs]
    lines = []
    for number, half in enumerate(halves):
        if number == 0:
            lines.append(half.open(ends[0][0], specs[0]))
        elif number == len(halves) - 1:
            lines.append(half.open(ends[-1][1], specs[-1]))
        else:
            before, after = ends[number - 1][1], ends[number][0]
            shapes = specs[number - 1], specs[number]
            lines.append(half.open(before, after, shapes[0], shapes[1]))
    return lines


def together(role, parts):
    """Runs a role for each part of a chain, at the same time."""
    with concurrent.futures.ThreadPoolExecutor(parts) as pool:
        list(pool.map(role, range(parts)))


@functools.cache
def train(parts, steps=3, **settings):
    """Trains a chain, a thread a part; returns parameters and the losses."""
    halves, specs = made(parts, **settings)
    lines = opened(halves, specs)
    params, losses = [init(part) for part in range(parts)], []

    def role(part):
        line = lines[part]
        state = nebula.state(params[part], SGD)
        for step in range(1, steps + 1):
            grads, line, metrics = halves[part].step(
                state.params, batches(step), KEY, step, line
            )
            state = state.apply(grads)
            if metrics:
                losses.append(float(metrics["loss"]))
        params[part] = state.params

    together(role, parts)
    return params, losses


@functools.cache
def train_whole(parts, steps=3, clip_norm=0.0):
    params = [init(part) for part in range(parts)]
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    losses = []
    for step in range(1, steps + 1):
        loss, grads = jax.value_and_grad(whole_loss)(params, step, parts)
        grads, _ = clip.update(grads, clip.init(grads))
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        losses.append(float(loss))
    return params, losses


@pytest.mark.parametrize(("parts", "clip_norm"), [(2, 0.05), (3, 0.0), (4, 0.05)])
def test_a_chain_equals_the_uncut_model(parts, clip_norm):
    params, losses = train(parts, clip_norm=clip_norm)
    expected, loss = train_whole(parts, clip_norm=clip_norm)
    np.testing.assert_allclose(losses, loss, rtol=1e-5)
    trees.assert_close(params, expected, atol=1e-6)


@pytest.mark.parametrize("codec", ["error_feedback(int4(2))", "fp16|zstd(1)"])
def test_with_a_codec_a_chain_stays_near_the_uncut_model(codec):
    _, losses = train(3, codec=codec)
    _, expected = train_whole(3, clip_norm=0.0)
    np.testing.assert_allclose(losses, expected, rtol=0.1)


def test_how_many_are_in_flight_changes_no_bit():
    params, _ = train(3, ahead=1)
    others, _ = train(3, clip_norm=0.0)
    trees.assert_same(params, others)


def test_a_sum_is_as_many_times_the_mean_as_there_are_micro_batches():
    _, total = train(2, steps=1, reduce="sum")
    _, mean = train_whole(2, clip_norm=0.05)
    np.testing.assert_allclose(total[0], MICRO_BATCHES * mean[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("counts", "identities", "words"),
    [
        ((2, 3, 3), (1, 1, 1), "has 2 micro-batches in step 1, this side at least 3"),
        ((3, 3, 2), (1, 1, 1), "has at least 3 micro-batches in step 1, this side 2"),
        ((3, 3, 3), (1, 2, 2), "has another batch in step 1 than this side"),
        ((3, 3, 3), ([1, 7], None, 2), ""),
        ((3, 3, 3), ([7, 8], np.int32([7, 8]), [7, 8]), ""),
    ],
)
def test_parts_that_are_not_at_the_same_batch_say_so(counts, identities, words):
    """The first to notice has both numbers; the others would wait for ever."""
    halves, specs = made(3, ahead=1)
    lines, said = opened(halves, specs, seconds=3.0), []

    def role(part):
        parts = batches(1)[: counts[part]]
        given = init(part), parts, KEY, 1, lines[part], identities[part]
        try:
            halves[part].step(*given)
        except nebula.errors.NebulaError as error:
            said.append(str(error))

    together(role, 3)
    assert words in said[0] if words else not said


SUMMED = cut.back(lambda params, h, *_: jnp.sum(h @ params["w"]))


def received(half, steps=1, identity=None):
    """The line of a last part to which a micro-batch of each step has come."""
    ends, spec = loopback.ends(), jax.ShapeDtypeStruct((3, 2), jnp.float32)
    line = half.open(ends[0], spec)
    sender = ends[1].sender("hidden", spec, nebula.codecs.identity())
    ends[1].receiver("gradient", spec, nebula.codecs.identity())
    for step in range(1, steps + 1):
        sender.send(step, jnp.ones((3, 2)))
        sender.end_step(step, 1, identity)
    return line


@pytest.mark.parametrize(
    ("here", "there", "batch", "count"),
    [
        (None, None, np.ones(3), 1),
        (7, None, np.ones(3), 1),
        (None, 7, np.ones(3), 1),
        (7, 7, np.ones(3), 0),
        (None, None, None, 0),  # of a part that has none, such as no targets
    ],
)
def test_batches_that_nothing_compares_are_named_once(
    monkeypatch, here, there, batch, count
):
    told = []
    monkeypatch.setattr(cut.process, "message", told.append)
    cut._report_uncompared.cache_clear()
    line = received(SUMMED, 2, there)
    for step in (1, 2):
        _, line, _ = SUMMED.step({"w": jnp.ones(2)}, [batch], None, step, line, here)
    assert len(told) == count
    assert all("Pass identity=" in each for each in told)


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ({"ahead": 1}, {}, "hidden, ahead=1"),
        ({"reduce": "sum"}, {}, "hidden, reduce=sum"),
        ({"codec": "fp16"}, {}, "fp16"),
        ({"clip_norm": 1.0}, {"clip_norm": 2.0}, "clip_norm=1"),
    ],
)
def test_parts_with_other_settings_are_refused(here, there, words):
    ends = loopback.ends()
    spec = cut.spec(front, init(0), batches(1)[0])
    cut.front(front, **here).open(ends[0], spec)
    with pytest.raises(nebula.errors.NebulaError, match=words):
        cut.back(back, **there).open(ends[1], spec)


def test_the_last_part_has_no_loss_beside_its_own():
    with pytest.raises(nebula.errors.SettingsError, match="has_loss is for parts"):
        cut.back(back, has_loss=True)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda params, h, *_: h @ params["w"], r"one number, not of shape \[3"),
        (lambda params, h, *_: (jnp.sum(h), 3.0), "dict of metrics"),
        (lambda params, h, *_: {"loss": jnp.sum(h)}, "as one number, not <class 'dict"),
        (lambda params, h, *_: jnp.sum(h).astype(jnp.int32), "not int32, which has no"),
    ],
)
def test_what_the_last_part_must_not_return_is_named(fn, words):
    half = cut.back(fn)
    line = received(half)
    with pytest.raises(nebula.errors.SettingsError, match=words) as caught:
        half.step({"w": jnp.ones(2)}, [0], None, 1, line)
    assert isinstance(caught.value, TypeError)


def test_a_loss_of_a_part_before_the_last_has_a_gradient_too():
    half = cut.front(lambda params, x, rng: (x, jnp.int32(3)), has_loss=True)
    line = half.open(loopback.ends()[0], jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(nebula.errors.SettingsError, match=r"part with has_loss.*int32"):
        half.step({}, [jnp.ones(3)], None, 1, line)


def test_a_middle_part_may_have_a_loss_and_statistics_of_its_own():
    def counted(params, seen, h, batch, rng):
        made = middle(params, h, batch, rng) - seen
        mean = jax.lax.stop_gradient(jnp.mean(made))
        return (made, 0.1 * jnp.mean(made**2)), 0.9 * seen + 0.1 * mean

    begin, batch = jnp.zeros(()), batches(1)[0]
    h = cut.spec(front, init(0), batch)
    made = cut.spec(counted, init(1), h, batch, has_loss=True, aux=begin)
    parts = [
        cut.front(front),
        cut.middle(counted, has_aux=True, has_loss=True),
        cut.back(back),
    ]
    first, second = (loopback.ends(seconds=60.0) for _ in range(2))
    lines = [
        parts[0].open(first[0], h),
        parts[1].open(first[1], second[0], h, made, aux=begin),
        parts[2].open(second[1], made),
    ]
    params = [init(part) for part in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        steps = [
            pool.submit(part.step, own, batches(1), KEY, 1, line)
            for part, own, line in zip(parts, params, lines, strict=True)
        ]
        grads, after, _ = zip(*(each.result(60) for each in steps), strict=True)

    def loss(params):
        total, seen = 0.0, begin
        for number, batch in enumerate(batches(1)):
            rng = jax.random.fold_in(jax.random.fold_in(KEY, 1), number)
            h = front(params[0], batch, rng)
            (h, own), seen = counted(params[1], seen, h, batch, rng)
            total += (own + back(params[2], h, batch, rng)[0]) / MICRO_BATCHES
        return total, seen

    expected, seen = jax.grad(loss, has_aux=True)(params)
    trees.assert_close(list(grads), expected, atol=1e-6)
    np.testing.assert_allclose(after[1].aux, seen, rtol=1e-5)


@pytest.mark.parametrize(
    "batch", [[], np.ones((2, 3)), {"x": np.ones((2, 3))}, (jnp.ones(3), 1), None]
)
def test_what_is_no_list_of_micro_batches_is_not_taken_apart(batch):
    half = cut.front(lambda params, x, rng: x)
    line = half.open(loopback.ends()[0], jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(nebula.errors.SettingsError, match=r"\[batch\] for a whole"):
        half.step({}, batch, None, 1, line)


@pytest.mark.parametrize("name", ["codec", "backward_codec"])
def test_what_is_no_codec_is_named(name):
    with pytest.raises(nebula.errors.SettingsError, match=f"^{name}=3: expected a"):
        cut.front(front, **{name: 3})


@pytest.mark.parametrize(
    ("made", "given", "words"),
    [
        ({"h": jnp.ones(2), "name": "x"}, {}, r"h\['name'\] is no array"),
        (jnp.ones(2, int), {}, "no gradient can come back"),
        (jnp.ones(2), {"has_loss": True}, r"returns \(h, its own loss\)"),
        (jnp.ones(2), {"aux": {}}, r"returns \(what it returns otherwise, aux\)"),
    ],
)
def test_what_a_part_must_not_send_is_named_before_it_is_opened(made, given, words):
    with pytest.raises(nebula.errors.SettingsError, match=words):
        cut.spec(lambda *_: made, {}, jnp.ones(2), **given)


@pytest.mark.parametrize("codec", ["fp16", "error_feedback(int8(4))"])
def test_a_micro_batch_of_another_shape_names_what_was_opened(codec):
    half = cut.front(front, codec=codec)
    line = half.open(loopback.ends()[0], cut.spec(front, init(0), batches(1)[0]))
    short = [batches(1)[0], jax.tree.map(lambda leaf: leaf[:1], batches(1)[1])]
    with pytest.raises(nebula.errors.SettingsError, match=r"\[1, .*half\.open was"):
        half.step(init(0), short, KEY, 1, line)


def test_a_line_that_is_used_twice_is_named():
    halves, specs = made(2, codec="error_feedback(int8(4))")
    lines = opened(halves, specs)
    together(lambda n: halves[n].step(init(n), batches(1), KEY, 1, lines[n]), 2)
    with pytest.raises(nebula.errors.SettingsError, match="step 2: this line is used"):
        halves[0].step(init(0), batches(2), KEY, 2, lines[0])


def test_an_error_in_a_part_names_its_line_and_what_it_was_given():
    """The last lines of its traceback are those of JAX."""

    def narrow(params, batch, rng):
        return layer(params, batch["x"][:, :5], rng)

    (batch, *_) = batches(1)
    half = cut.front(narrow)
    h = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    line = half.open(loopback.ends()[0], h)
    calls = (
        lambda: cut.spec(narrow, init(0), batch),
        lambda: half.step(init(0), [batch], None, 1, line),
    )
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call()
        notes = "\n".join(caught.value.__notes__)
        first = narrow.__code__.co_firstlineno
        assert f"test_cut.py:{first + 1}: in narrow, given after the" in notes
        assert "'x': 'float32[4,6]'" in notes
