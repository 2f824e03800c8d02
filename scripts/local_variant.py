"""Trains the replicas of several clusters in one process, by a variant of local steps.

    python -m scripts.local_variant --rule=averaged --cluster=whole --flagfile=FILE

Everything but the rule is `experiments.pretrain_bert`'s: text, masks, model, rate,
rounds, codec. `--rule=plain` comes to the loss of `--cluster=whole` there.

K clusters, P fragments, H steps between two rounds of a fragment.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import shared_flags
from experiments.bert import config, data, models
from experiments.pretraining import text as text_lib
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.communication import codec as codec_lib
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.runtime.records import report
from nebula_jax.training import bert, diloco, optimizers, partition

RULES = {
    "plain": "streaming rounds, nothing else",
    "divided": "second moments are divided by K in the update",
    "mended": "second moments are scaled by |mean of deltas|^2 / mean of |delta|^2",
    "averaged": "second moments are averaged at rounds, at four bits",
    "averaged_divided": "both",
    "low_rank": "LoRDO (2602.04396): moments in a subspace of the mean delta",
    "chosen": "CoCoDC (2504.17672): the fragment that changes most, delay compensated",
    "unequal": "the last cluster is SLOWER times slower; rounds weigh by steps",
    "unequal_late": "the same, and who has taken H steps sends, and waits for nobody",
    "unequal_aligned": "the same, and late deltas are aligned (HeLoCo, 2606.00271)",
}
flags.DEFINE_enum("rule", "plain", list(RULES), "Variant of local steps.")
BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-6  # of bert.Config.transformation
RANK = 16  # of LoRDO, of a width of 64
FULL_RANK = 0.5  # share of LoRDO's full-rank term
SLOWER = 3
ALIGNED, CONFIDENCE = 0.3, 1.0  # HeLoCo's c_ok and kappa; ours
TAYLOR = 0.5  # CoCoDC's lambda


class Inner(NamedTuple):
    """The moments of each parameter in one cluster."""

    first: Any
    """Mean of gradients; in LoRDO of the projected ones."""
    second: Any
    """Mean of their squares."""
    unseen: Any
    """LoRDO's error feedback; else zeros of no size."""


Update = Callable[[Any, Inner, Any, Any, Any], tuple[Any, Inner]]
"""Parameters, moments, gradients, step, factor of second moments by parameter or bases
-> parameters, moments."""


def adam_update(cfg: bert.Config, is_decayed: Any) -> Update:
    """Returns Adam's step with a factor of each parameter's second moment."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(
        params: Any, inner: Inner, grads: Any, step: Any, factors: Any
    ) -> tuple[Any, Inner]:
        count, rate = step + 1, _rate(cfg, step)

        def one(p: Any, m: Any, v: Any, g: Any, factor: Any, decays: bool) -> Any:
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g * g
            size = jnp.sqrt(factor * v / (1 - BETA2**count)) + EPSILON
            change = m / (1 - BETA1**count) / size
            if decays:
                change += cfg.weight_decay * p
            return p - rate * change, m, v

        found = jax.tree.map(
            one, params, inner.first, inner.second, grads, factors, is_decayed
        )
        params, first, second = _apart(found, 3)
        return params, Inner(first, second, inner.unseen)

    return update


def low_rank_update(cfg: bert.Config, is_decayed: Any) -> Update:
    """Returns LoRDO's step; arrays that are no matrices have Adam's."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(
        params: Any, inner: Inner, grads: Any, step: Any, bases: Any
    ) -> tuple[Any, Inner]:
        count, rate = step + 1, _rate(cfg, step)

        def one(
            p: Any, u: Any, v: Any, e: Any, g: Any, basis: Any, decays: bool
        ) -> Any:
            seen, full = g, 0.0
            if basis.ndim == 2:
                full = _as_matrix(g)
                seen = basis.T @ (full + e)
                e = full + e - basis @ seen
            u = BETA1 * u + (1 - BETA1) * seen
            v = BETA2 * v + (1 - BETA2) * seen * seen
            size = jnp.sqrt(v / (1 - BETA2**count))
            change = u / (1 - BETA1**count) / (size + EPSILON)
            if basis.ndim == 2:
                # The subspace has RANK rows of sizes; the full gradient takes their
                # mean square in each column.
                column = jnp.sqrt(jnp.mean(size * size, axis=0)) + EPSILON
                mixed = FULL_RANK * full / column + (1 - FULL_RANK) * basis @ change
                change = _from_matrix(mixed, p.shape)
            if decays:
                change += cfg.weight_decay * p
            return p - rate * change, u, v, e

        found = jax.tree.map(
            one, params, *inner[:2], inner.unseen, grads, bases, is_decayed
        )
        params, *moments = _apart(found, 4)
        return params, Inner(*moments)

    return update


def _rate(cfg: bert.Config, step: Any) -> Any:
    return cfg.learning_rate * optimizers.rise_and_fall(step / cfg.steps, cfg.warmup)


def _apart(tree: Any, count: int) -> list[Any]:
    def is_leaf(leaf: Any) -> bool:
        return isinstance(leaf, tuple)

    return [
        jax.tree.map(lambda leaf, n=n: leaf[n], tree, is_leaf=is_leaf)
        for n in range(count)
    ]


def _as_matrix(leaf: Any) -> Any:
    """Returns a matrix, its smaller side first; of [D, H, K] it is D x HK."""
    if leaf.ndim == 3:
        is_output = leaf.shape[-1] == leaf.shape[0] * leaf.shape[1]
        leaf = leaf.reshape((-1, leaf.shape[-1]) if is_output else (leaf.shape[0], -1))
    return leaf if leaf.shape[0] <= leaf.shape[1] else leaf.T


def _from_matrix(matrix: Any, shape: tuple[int, ...]) -> Any:
    """Inverts `_as_matrix`."""
    rows, columns = shape[0], int(np.prod(shape[1:]))
    if len(shape) == 3 and shape[-1] == shape[0] * shape[1]:
        rows, columns = shape[0] * shape[1], shape[-1]
    matrix = matrix if rows <= columns else matrix.T
    return matrix.reshape(shape)


def basis_of(leaf: jax.Array) -> jax.Array:
    """Returns the RANK directions in which most of a delta lies; [] of a vector."""
    if leaf.ndim < 2 or min(_as_matrix(leaf).shape) <= RANK:
        return jnp.ones(())
    matrix = _as_matrix(leaf)
    return jnp.linalg.eigh(matrix @ matrix.T)[1][:, -RANK:]


def ratio(*deltas: jax.Array) -> jax.Array:
    """Returns |mean|^2 / mean of |delta|^2, [] float32 from 1 / K to 1."""
    joint = jnp.sum(jnp.square(sum(deltas) / len(deltas)))
    own = sum(jnp.sum(jnp.square(each)) for each in deltas) / len(deltas)
    return joint / jnp.maximum(own, 1e-30)


def at_four_bits(second: jax.Array) -> jax.Array:
    """Rounds roots to sixteen sizes, each half of the one before."""
    root = jnp.sqrt(second)
    top = jnp.max(root)
    level = jnp.round(jnp.log2(jnp.maximum(root, 1e-30) / jnp.maximum(top, 1e-30)))
    return jnp.square(top * 2.0 ** jnp.clip(level, -15, 0))


def aligned(delta: jax.Array, momentum: jax.Array) -> jax.Array:
    """Turns a late delta toward the outer momentum, as HeLoCo does by tensor."""
    size, other = jnp.linalg.norm(delta), jnp.linalg.norm(momentum)
    unit = delta / jnp.maximum(size, 1e-12)
    way = momentum / jnp.maximum(other, 1e-12)
    cosine = jnp.sum(unit * way)
    sure = size / (size + CONFIDENCE * other + 1e-12)
    against = delta - jnp.minimum(-cosine * sure, 1.0) * cosine * size * way
    turned = (1 - (ALIGNED - cosine) * sure) * unit + (ALIGNED - cosine) * sure * way
    turned *= size / jnp.maximum(jnp.linalg.norm(turned), 1e-12)
    found = jnp.where(cosine < 0, against, turned)
    return jnp.where((cosine >= ALIGNED) | (other == 0), delta, found)


class Clusters:
    """The replicas of all clusters, and their text."""

    def __init__(self, run: config.Run, rule: str):
        """Draws parameters as the run does."""
        self.run, self.rule = run, rule
        vocabulary = vocabularies.given(run.local)
        made = models.load(run, vocabulary)
        self.cfg: bert.Config = made.config
        state, self.frozen = bert.init(self.cfg, run.agreed.seed, made.encoder)
        self.rng = state.rng
        self.count = run.agreed.clusters
        copy = functools.partial(jax.tree.map, jnp.copy)
        self.params = [copy(state.params) for _ in range(self.count)]
        is_decayed = optimizers._has_decay(state.params)
        is_low_rank = rule == "low_rank"
        make = low_rank_update if is_low_rank else adam_update
        self._update = make(self.cfg, is_decayed)
        factor = 1 / self.count if rule.endswith("divided") else 1.0
        self.factors = [jax.tree.map(lambda _: jnp.float32(factor), state.params)]
        self.factors *= self.count
        if is_low_rank:
            keys = iter(jax.random.split(jax.random.key(0), 1000))
            drawn = jax.tree.map(
                lambda leaf: basis_of(jax.random.normal(next(keys), leaf.shape)),
                state.params,
            )
            self.factors = [drawn] * self.count
        self.inner = [self._begin() for _ in range(self.count)]
        self.shares = [data.share_of(run.agreed, k) for k in range(self.count)]
        self.text = data.text_of(run, 0, vocabulary)
        self.text.begin(None, self.shares[0].batch_size, slice(None))
        self.tokens = self.sent = 0
        """Tokens trained on, and bytes of all that was sent, to each other cluster."""
        self._gradient = jax.jit(self._gradient_of)
        self._evaluate = jax.jit(functools.partial(bert.evaluate, self.cfg))

    def _begin(self) -> Inner:
        def second(leaf: jax.Array, basis: jax.Array) -> jax.Array:
            if basis.ndim < 2:
                return jnp.zeros_like(leaf)
            return jnp.zeros((RANK, _as_matrix(leaf).shape[1]))

        def unseen(leaf: jax.Array, basis: jax.Array) -> jax.Array:
            return (
                jnp.zeros_like(_as_matrix(leaf)) if basis.ndim == 2 else jnp.zeros(())
            )

        both = self.params[0], self.factors[0]
        of_second = functools.partial(jax.tree.map, second, *both)
        return Inner(of_second(), of_second(), jax.tree.map(unseen, *both))

    def _gradient_of(self, params: Any, step: Any, ids: Any, first: Any) -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(self.rng), step)
        rows = bert.mask(self.cfg, jax.random.split(key)[0], ids, first)
        loss = bert.loss_of(self.cfg, None, bert._weight(rows), self.frozen)
        grads = jax.grad(lambda p: loss(p, rows, None).loss)(params)
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]
        factor = jnp.minimum(1.0, self.cfg.clip_norm / jnp.sqrt(sum(squares)))
        return jax.tree.map(lambda leaf: leaf * factor, grads)

    def step(self, step: int, ids: np.ndarray, k: int) -> None:
        """Takes a step of cluster k with its rows of a batch; steps count from 0."""
        own = self.shares[k]
        rows = ids[own.within()]
        self.tokens += int(np.sum(rows != bert.PAD))
        grads = self._gradient(
            self.params[k], step, jnp.asarray(rows), np.int32(own.number)
        )
        self.params[k], self.inner[k] = self._update(
            self.params[k], self.inner[k], grads, step, self.factors[k]
        )

    def held_out(self) -> float:
        """Returns nats a masked token of the first replica, mean of the languages."""
        params = partition.merge(self.params[0], self.frozen)
        found = text_lib.masked_lm_figures(
            self.text.held_out(),
            lambda key, ids: self._evaluate(params, key, jnp.asarray(ids)),
        )
        return float(np.mean([each["mlm_loss"] for each in found.values()]))


class Rounds:
    """The streaming rounds of all clusters, with what a rule does at each."""

    def __init__(self, clusters: Clusters):
        """Makes a member of each cluster."""
        self._of = clusters
        agreed = clusters.run.agreed
        names = config.names(agreed)
        self.members = [
            member_lib.Member(agreed.rounds(), names, name, clusters.params[0])
            for name in names
        ]
        self.config, self._where = self.members[0].config, self.members[0]._where
        self._flying: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}
        self._met = [0] * self.config.fragments
        """The step at which each fragment was last sent."""
        self._changed = [0.0] * self.config.fragments
        """How far its anchor moved then."""

    def after(self, step: int) -> None:
        """Sends and applies what is due after a step, which counts from 1."""
        settings = self.config
        if settings.sent_after(step) is not None:
            fragment = self._chosen(step)
            self._met[fragment] = step
            self._flying[step, fragment] = self._sent(step, fragment)
        if settings.applied_after(step) is not None:
            for sent, fragment in list(self._flying):
                if sent == step - settings.delay:
                    self._apply(sent, fragment)

    def _chosen(self, step: int) -> int:
        due = self.config.sent_after(step)
        assert due is not None
        if self._of.rule != "chosen":
            return due
        waits = [step - met for met in self._met]
        longest = int(np.argmax(waits))
        if waits[longest] >= 2 * self.config.inner_steps or 0 in self._met:
            return longest
        speeds = [
            change / wait for change, wait in zip(self._changed, waits, strict=True)
        ]
        return int(np.argmax(speeds))

    def _sent(self, step: int, fragment: int) -> tuple[list[Any], list[Any]]:
        params = self._of.params
        payloads = [
            each.outgoing(step, fragment, params[k])
            for k, each in enumerate(self.members)
        ]
        self._of.sent += (self._of.count - 1) * sum(map(codec_lib.nbytes, payloads))
        # Copies: a step uses the parameters up.
        own = [diloco.split(each, self._where)[fragment] for each in params]
        return payloads, [jax.tree.map(jnp.copy, each) for each in own]

    def _apply(self, sent: int, fragment: int) -> None:
        of, (payloads, then) = self._of, self._flying.pop((sent, fragment))
        before = self.members[0].outers[fragment].anchor
        deltas = [diloco.outer_gradient(before, each) for each in then]
        now = [diloco.split(each, self._where)[fragment] for each in of.params]
        now = [jax.tree.map(jnp.copy, each) for each in now]
        for k, each in enumerate(self.members):
            of.params[k], _ = each.incoming(sent, fragment, of.params[k], payloads)
        anchor = self.members[0].outers[fragment].anchor
        moved = diloco.outer_gradient(before, anchor)
        self._changed[fragment] = diloco.norm(jax.device_get(moved))
        if of.rule.startswith("averaged"):
            self._average(fragment)
        if of.rule == "mended":
            found = jax.tree.map(ratio, *deltas)
            of.factors = [diloco.replace(each, found) for each in of.factors]
        if of.rule == "low_rank":
            mean = jax.tree.map(lambda *each: sum(each) / len(each), *deltas)
            bases = jax.tree.map(basis_of, mean)
            of.factors = [_placed(each, bases) for each in of.factors]
        if of.rule == "chosen":
            for k in range(of.count):
                self._compensate(k, anchor, then[k], now[k])

    def _average(self, fragment: int) -> None:
        of = self._of
        rounded = [jax.tree.map(at_four_bits, each.second) for each in of.inner]
        mean = jax.tree.map(lambda *each: sum(each) / len(each), *rounded)
        part = diloco.split(mean, self._where)[fragment]
        numbers = sum(leaf.size for leaf in part.values())
        of.sent += of.count * (of.count - 1) * numbers // 2
        for k, each in enumerate(of.inner):
            copy = jax.tree.map(jnp.copy, part)
            of.inner[k] = each._replace(second=diloco.replace(each.second, copy))

    def _compensate(self, k: int, anchor: Any, then: Any, now: Any) -> None:
        """Adds to the anchor what the cluster has done meanwhile, corrected."""
        delay = max(1, self.config.delay)

        def one(a: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
            slope = (after - before) / delay
            slope += TAYLOR * slope * slope * (a - before) / self.config.inner_steps
            return a + delay * slope

        part = jax.tree.map(one, anchor, then, now)
        self._of.params[k] = diloco.replace(self._of.params[k], part)

    def close(self, step: int) -> None:
        """Has the last rounds: afterwards the first replica is the mean."""
        of = self._of
        for sent, fragment in list(self._flying):
            self._apply(sent, fragment)
        for fragment in range(self.config.fragments):
            if self._met[fragment] != step:
                self._flying[step, fragment] = self._sent(step, fragment)
                self._apply(step, fragment)
        closing = [each.closing(step) for each in self.members]
        of.params[0] = self.members[0].close(step, of.params[0], closing)


def _placed(tree: Any, named: Mapping[str, Any]) -> Any:
    return partition.map_named(lambda path, leaf: named.get(path, leaf), tree)


class Unequal:
    """The rounds of two clusters, the second SLOWER times slower; in float32."""

    def __init__(self, clusters: Clusters):
        """Begins with anchors that are the parameters."""
        self._of, agreed = clusters, clusters.run.agreed
        whole = dataclasses.replace(agreed.rounds(), fragments=1, delay=0)
        self.config = dataclasses.replace(whole.config(1), mixing=0.0)
        self._where = diloco.places(clusters.params[0], 1)
        (part,) = diloco.split(clusters.params[0], self._where)
        self._outer = diloco.begin(self.config, part)
        self._anchors = [self._outer.anchor] * clusters.count
        self._rounds = 0
        self._steps = [0] * clusters.count

    def computes(self, step: int, k: int) -> bool:
        """Returns True if cluster k ends a step of its own at this one, from 1."""
        return k < self._of.count - 1 or step % SLOWER == 0

    def after(self, step: int) -> None:
        """Has the rounds that are due after a step of the fast clusters."""
        of, every = self._of, self.config.inner_steps
        for k in range(of.count):
            self._steps[k] += self.computes(step, k)
        if of.rule == "unequal":
            if step % every == 0:
                total = sum(self._steps)
                self._meet({k: n / total for k, n in enumerate(self._steps)})
            return
        for k in range(of.count):
            if self._steps[k] == every:
                self._meet({k: 1 / of.count})

    def _meet(self, weights: Mapping[int, float]) -> None:
        of, deltas = self._of, []
        for k in weights:
            (own,) = diloco.split(of.params[k], self._where)
            deltas.append(diloco.outer_gradient(self._anchors[k], own))
            of.sent += (of.count - 1) * sum(leaf.nbytes for leaf in own.values())
        if of.rule == "unequal_aligned" and self._rounds:
            momentum = self._outer.optimizer[0].trace
            deltas = [jax.tree.map(aligned, each, momentum) for each in deltas]
        self._outer = diloco.outer_step(
            self.config, self._outer, deltas, list(weights.values()), not self._rounds
        )
        self._rounds += 1
        for k in weights:
            copy = jax.tree.map(jnp.copy, self._outer.anchor)
            of.params[k] = diloco.replace(of.params[k], copy)
            self._anchors[k], self._steps[k] = self._outer.anchor, 0

    def close(self, step: int) -> None:
        """Has a last round of all, with the steps since theirs as weights."""
        del step
        total = sum(self._steps)
        if total:
            of, weights = self._of, {k: n / total for k, n in enumerate(self._steps)}
            self._meet(weights)
            copy = jax.tree.map(jnp.copy, self._outer.anchor)
            of.params[0] = diloco.replace(of.params[0], copy)


class Alone:
    """One cluster: no rounds; LoRDO's bases are of its own change."""

    def __init__(self, clusters: Clusters):
        """Begins with a copy of the parameters."""
        self._of = clusters
        self._every = clusters.run.agreed.inner_steps
        self._then = jax.tree.map(jnp.copy, clusters.params[0])

    def after(self, step: int) -> None:
        """Makes new bases every H steps."""
        of = self._of
        if of.rule == "low_rank" and step % self._every == 0:
            moved = jax.tree.map(jnp.subtract, self._then, of.params[0])
            of.factors = [jax.tree.map(basis_of, moved)]
            self._then = jax.tree.map(jnp.copy, of.params[0])

    def close(self, step: int) -> None:
        """Does nothing."""


def steps(clusters: Clusters) -> Iterator[tuple[int, float]]:
    """Trains to the end; yields step and held-out loss at every evaluation."""
    agreed = clusters.run.agreed
    rounds: Any
    if clusters.rule.startswith("unequal"):
        rounds = Unequal(clusters)
    else:
        rounds = Alone(clusters) if clusters.count == 1 else Rounds(clusters)
    for step in range(1, agreed.steps + 1):
        ids = next(clusters.text.batches)
        for k in range(clusters.count):
            if not isinstance(rounds, Unequal) or rounds.computes(step, k):
                clusters.step(step - 1, ids, k)
        is_last = step == agreed.steps
        rounds.close(step) if is_last else rounds.after(step)
        if is_last or step % agreed.eval_every == 0:
            yield step, clusters.held_out()


def crossed(clusters: Clusters) -> dict[str, float]:
    """Returns bytes a token, and how many times fewer than an all-reduce's."""
    numbers = sum(leaf.size for leaf in jax.tree.leaves(clusters.params[0]))
    # 2 (K - 1) / K float32 gradients a cluster and step.
    all_reduce = clusters.run.agreed.steps * numbers * 2 * (clusters.count - 1) * 4
    return {
        "per_token": clusters.sent / clusters.tokens,
        "fewer": all_reduce / clusters.sent,
    }


def main() -> int:
    """Trains as the flags have it; writes summary.json into --workdir."""
    run = data.checked(config.from_flags())
    local = dataclasses.replace(run.local, vocabulary=str(data.shared_vocabulary(run)))
    clusters = Clusters(
        dataclasses.replace(run, local=local), flags.FLAGS["rule"].value or "plain"
    )
    began, losses = time.monotonic(), []
    for step, loss in steps(clusters):
        losses.append([step, loss])
        print(f"step {step}: held-out loss {loss:.4f}", flush=True)
    summary = report.provenance(time.monotonic() - began) | {"losses": losses}
    summary["flags"] = dataclasses.asdict(run.agreed)
    if clusters.sent:
        summary["bytes"] = crossed(clusters)
    report.write(pathlib.Path(run.local.workdir) / "summary.json", summary)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=[*config.FLAGS, "rule"])
