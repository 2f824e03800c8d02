"""Local steps in a user's loop: any pytree, any optimizer, and what may go wrong."""

import concurrent.futures
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ports
import pytest
import trees
from flax import nnx

from nebula_jax import errors, trace
from nebula_jax.communication import codecs, worker_link
from nebula_jax.communication.wire import activity, frames
from nebula_jax.parallel.local_steps import settings as settings_lib
from nebula_jax.runtime import connect, context, local_steps
from nebula_jax.runtime.connect import all_clusters

SECONDS = 30.0
ROWS = 12  # of a batch of all clusters
# One codec, so that members of all tests compile it once.
Settings = functools.partial(
    settings_lib.Settings, codec=codecs.from_string("e3m0(256)")
)
FEEDBACK = codecs.from_string("error_feedback(int4(8))")
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)


class Process:
    """What local steps use of a Context, which only a main thread can have."""

    def __init__(self, name, steps, every=4):
        self.settings = context.Settings(
            workdir=pathlib.Path(),
            cluster=name,
            steps=steps,
            checkpoint_every=every,
            connection=connect.Settings(connect_timeout=SECONDS),
        )
        self.step, self.is_stopped = 0, False
        self.work = activity.Work(SECONDS)

    def stop_requested(self):
        return self.is_stopped

    def each(self, steps):
        for self.step in steps:
            yield self.step


def together(body, count=2, hub="", steps=8):
    """Runs `body(process, peers)` in clusters that meet over sockets; its results."""
    names = [f"lab{number}" for number in range(count)]
    where = {name: f"127.0.0.1:{ports.free_port()}" for name in names}

    def cluster(name):
        dialed = all_clusters.dialed(name, names, hub)
        settings = connect.Settings(
            listen=where[name],
            peer=",".join(where[each] for each in dialed),
            tls="off",
            connect_timeout=SECONDS,
            reconnect_timeout=0.0,
        )
        process = Process(name, steps)
        hello = frames.Hello(name, "1", {})
        with all_clusters.connected(
            settings, hello, names, hub=hub, work=process.work
        ) as peers:
            return body(process, peers)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        ends = [pool.submit(cluster, name) for name in names]
        return [end.exception() or end.result() for end in ends]


def alone(body, steps=8):
    process = Process("lab0", steps)
    hello = frames.Hello("lab0", "1", {})
    return body(process, all_clusters.Peers(hello, {}, (), ("lab0",)))


class Saved:
    """Checkpoints in memory."""

    def __init__(self, steps=()):
        self.steps, self.window = list(steps), 0

    @property
    def newest(self):
        return max([0, *self.steps])

    def widen(self, window):
        self.window = window


# Models, and how to apply them.


def _array(seed, *shape):
    values = np.random.default_rng(seed).normal(size=shape) / 2
    return jnp.asarray(values, jnp.float32)


def dict_model():
    params = {
        "Dense_0": {"kernel": _array(1, 3, 5), "bias": jnp.zeros((1, 5))},
        "Dense_1": {"kernel": _array(2, 5, 1), "bias": jnp.zeros((1, 1))},
    }
    return params, apply_dict


def apply_dict(params, x):
    one, two = params["Dense_0"], params["Dense_1"]
    return jnp.tanh(x @ one["kernel"] + one["bias"]) @ two["kernel"] + two["bias"]


def nnx_model():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List(
                [nnx.Linear(3, 5, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)]
            )

        def __call__(self, x):
            return self.blocks[1](jnp.tanh(self.blocks[0](x)))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    return params, lambda params, x: nnx.merge(graph, params)(x)


def batch(step, rows):
    random = np.random.default_rng(step)
    x = random.normal(size=(ROWS, 3)).astype(np.float32)[rows]
    return x, x[:, :1] * x[:, 1:2]


@functools.cache  # clusters of a test compile it once
def trainer(apply, optimizer):
    """Returns (params, opt_state, batch) -> (params, opt_state, loss), jitted."""

    def loss(params, x, y):
        return jnp.mean((apply(params, x) - y) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def train(process, peers, model, optimizer, saves=None, resumed=None, **settings):
    """A user's loop; returns the parameters, the rounds and the losses."""
    params, apply = model
    params = jax.tree.map(jnp.copy, params)
    opt_state = optimizer.init(params)
    settings = Settings(**settings)
    rounds = local_steps.begin(process, peers, params, settings)
    rounds.agree_start(Saved())
    if resumed:
        process.step, params, opt_state, rounds = resumed(rounds)
    step_of, losses = trainer(apply, optimizer), []
    for step in process.each(rounds.steps()):
        mine = batch(step, rounds.share.rows(ROWS))
        params, opt_state, loss = step_of(params, opt_state, mine)
        params = rounds.after(step, params)
        losses.append(float(loss))
        if saves is not None and rounds.is_saved_after(step):
            values = jax.tree.map(np.asarray, (params, opt_state, rounds))
            saves[step] = jax.tree.leaves(values)
    return params, rounds, losses


def test_replicas_of_any_model_end_alike():
    made, optimizer = nnx_model(), optax.adamw(1e-2)

    def body(process, peers):
        return train(
            process, peers, made, optimizer, inner_steps=6, fragments=2, delay=1
        )

    found = together(body, steps=40)
    for each in found:
        assert not isinstance(each, Exception), each
    (one, rounds, losses), (two, _, others) = found
    trees.assert_same(one, two)
    assert losses != others  # each has rows of its own
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert rounds.is_last
    assert rounds.described["parameters"] == 26


def test_one_inner_step_is_an_all_reduce():
    """Plain SGD in the clusters, outer rate 1 and no momentum: the joint batch."""
    settings = {"inner_steps": 1, "learning_rate": 1.0, "momentum": 0.0}
    settings |= {"codec": "", "shares": (1, 2)}

    def body(process, peers):
        return train(process, peers, dict_model(), SGD, **settings)

    one, two = together(body)
    params, apply = dict_model()
    opt_state, step_of = SGD.init(params), trainer(apply, SGD)
    for step in range(1, 9):
        joint = batch(step, slice(None))
        params, opt_state, _ = step_of(params, opt_state, joint)
    trees.assert_same(one[0], two[0])
    trees.assert_close(one[0], params, atol=1e-6)


def test_three_around_a_hub_are_three_in_a_mesh():
    def body(process, peers):
        return train(process, peers, dict_model(), ADAM, inner_steps=3, codec=FEEDBACK)

    ends = [*together(body, 3), *together(body, 3, hub="lab1")]
    for each in ends[1:]:
        trees.assert_same(each[0], ends[0][0])


def test_a_run_with_noise_in_what_leaves_reports_what_privacy_that_is():
    """8 steps and 2 fragments have 4 rounds each; the end's digest needs no noise."""
    codec = codecs.from_string("private(0.5, 2)|fp16")

    def body(process, peers):
        return train(
            process,
            peers,
            dict_model(),
            ADAM,
            inner_steps=2,
            fragments=2,
            codec=codec,
            is_robust=True,
        )

    ends = together(body)
    for params, rounds, _ in ends:
        trees.assert_same(params, ends[0][0])
        about = rounds.described["privacy"]
        messages = about["messages"]
        assert 8 <= messages <= 9
        assert about["epsilon"] == codecs.epsilon(2.0, messages, about["delta"])


def test_all_stop_after_the_step_that_one_requests_and_say_who(capfd):
    """The library reads the request out of the heads: no loop does."""

    def body(process, peers):
        process.is_stopped = process.settings.cluster == "lab1"
        _, rounds, losses = train(
            process, peers, dict_model(), SGD, inner_steps=4, delay=2
        )
        return rounds.step, len(losses), rounds.is_over, rounds.is_last

    assert together(body, steps=40) == [(6, 6, True, False)] * 2
    words = "stopping, all clusters save step 6: lab1 asked to stop"
    assert "".join(capfd.readouterr()).count(words) == 2


def test_a_checkpoint_falls_where_no_message_is_in_flight_and_resumes_bit_for_bit():
    model = dict_model()
    settings = {"inner_steps": 4, "fragments": 2, "delay": 1, "momentum": 0.9}
    settings |= {"codec": FEEDBACK}
    saves: dict = {"lab0": {}, "lab1": {}}

    def body(process, peers):
        own = saves[process.settings.cluster]
        return train(process, peers, model, ADAM, own, **settings)

    whole = together(body, steps=14)
    # Due after 4, 8 and 12; a fragment is on its way from 4 to 5, and from 2 to 3.
    assert [sorted(each) for each in saves.values()] == [[5, 9, 13, 14]] * 2

    def again(process, peers):
        leaves = saves[process.settings.cluster][9]

        def resumed(rounds):
            like = model[0], ADAM.init(model[0]), rounds
            return 9, *jax.tree.unflatten(
                jax.tree.structure(like), map(jnp.asarray, leaves)
            )

        return train(process, peers, model, ADAM, resumed=resumed, **settings)

    for one, two in zip(whole, together(again, steps=14), strict=True):
        trees.assert_same(one[0], two[0])
        assert one[2][9:] == two[2]


def test_a_clusters_checkpoints_are_kept_for_others_that_are_behind():
    def body(process, peers):
        settings = Settings(inner_steps=100, delay=7)
        rounds = local_steps.begin(process, peers, dict_model()[0], settings)
        saved = Saved()
        rounds.agree_start(saved)
        return saved.window

    assert together(body) == [107, 107]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner_steps": 5}, "^lab. has inner_steps=[25]; lab. has inner_steps=[25]$"),
        ({"codec": "int8(8)"}, "codec="),
        ({"is_trained": lambda path: path.startswith("Dense_1")}, "has layout="),
        ({"seed": 1}, "^lab. has parameters at step 0 with the digest .*; lab. has"),
    ],
)
def test_clusters_that_differ_say_in_what(change, words):
    def body(process, peers):
        own = change if process.settings.cluster == "lab1" else {}
        params = dict_model()[0]
        if "seed" in own:
            params["Dense_0"]["bias"] += 1e-3
        given = {"inner_steps": 2} | {k: v for k, v in own.items() if k != "seed"}
        rounds = local_steps.begin(process, peers, params, Settings(**given))
        rounds.agree_start(Saved())

    found = together(body)
    assert any(words_in(each, words) for each in found), found


def words_in(error, words):
    return isinstance(error, errors.NebulaError) and re.search(words, str(error))


def test_a_loop_that_forgets_its_rounds_hears_of_it():
    def body(process, peers):
        settings = Settings(inner_steps=2)
        rounds = local_steps.begin(process, peers, dict_model()[0], settings)
        rounds.agree_start(Saved())
        for _ in process.each(rounds.steps()):
            pass

    for error in together(body):
        assert "call params = rounds.after(1, params)" in str(error)


def test_one_cluster_trains_as_if_there_were_no_rounds():
    def body(process, peers):
        return train(process, peers, dict_model(), SGD, inner_steps=2)

    params, rounds, losses = alone(body)
    assert len(losses) == 8
    assert rounds.is_last
    assert (rounds.values, rounds.described) == ({}, {})
    expected, apply = dict_model()
    step_of, opt_state = trainer(apply, SGD), SGD.init(expected)
    for step in range(1, 9):
        expected, opt_state, _ = step_of(expected, opt_state, batch(step, slice(None)))
    trees.assert_same(params, expected)


def test_rounds_are_a_pytree_that_no_abstract_value_harms():
    def body(process, peers):
        settings = Settings(inner_steps=2)
        rounds = local_steps.begin(process, peers, dict_model()[0], settings)
        jax.eval_shape(lambda tree: tree, rounds)
        jax.tree.map(lambda leaf: None, rounds)
        rounds.agree_start(Saved())
        return len(jax.tree.leaves(rounds)), rounds.values["versions"]

    assert together(body) == [(5, [0])] * 2  # four arrays, a version


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fragments": 5}, "fragments=5: there are 4 arrays"),
        ({"delay": 2}, "^delay must be below the 2 steps"),
        ({"codec": "pack_tokens|int8(64)"}, "^codec=.* chooses among codecs"),
        ({"shares": (1,)}, r"^shares=\(1,\): expected 2 numbers"),
        ({"quorum": 2}, "^quorum=2: needs a hub"),
        ({"grace": 2.0}, "^grace=2.0: is for rounds with a quorum"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, words):
    hello = frames.Hello("a", "1", {})
    peers = all_clusters.Peers(hello, {}, (), ("a", "b"))
    made = Settings(inner_steps=2, **settings)
    with pytest.raises(errors.SettingsError, match=words):
        local_steps.begin(Process("a", 9), peers, dict_model()[0], made)


def test_a_quorum_is_for_clusters_of_one_process_each():
    """Others would have to agree on what has arrived, time and again."""
    hellos = [frames.Hello(name, "1", {}) for name in ("a", "b")]
    shared = worker_link.WorkerLink(hellos[1], trace.OFF)
    peers = all_clusters.Peers(hellos[0], {"b": shared}, ("b",), ("a", "b"), "b")
    settings = Settings(inner_steps=2, quorum=2)
    with pytest.raises(errors.SettingsError, match="quorum is for clusters of one"):
        local_steps.begin(Process("a", 9), peers, dict_model()[0], settings)


def test_a_share_is_rows_that_follow_each_other():
    shares = [settings_lib.Share(number, (1, 2, 1)).rows(16) for number in range(3)]
    assert shares == [slice(0, 4), slice(4, 12), slice(12, 16)]
    with pytest.raises(errors.SettingsError, match=r"batch_size=6: .* a multiple of 4"):
        settings_lib.Share(0, (1, 2, 1)).rows(6)


@pytest.mark.parametrize(
    ("start", "before", "now", "is_short"),
    [(6, 6, 9, True), (8, 8, 9, False), (6, 9, 9, False), (6, 9, 12, False)],
)
def test_a_run_that_grows_says_that_its_last_short_round_stays(
    start, before, now, is_short, capsys
):
    """It had none if it ended with a whole round, or had not ended."""

    class Grown(Saved):
        def steps_of_run(self, step):
            assert step == start
            return before

    settings = Settings(inner_steps=4)
    rounds = local_steps.in_one_process(
        Process("a", now), ["a", "b"], dict_model()[0], settings
    )
    rounds.report_growth(Grown(), start)
    said = capsys.readouterr().err
    assert ("the run of 6 steps ended with a short round" in said) == is_short
