"""A plan of BERT: its counts against the traced model, its days by hand."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs
from nebula_jax.models import masked_lm, transformer
from nebula_jax.training import local_steps
from scripts.plans import bert, count

TINY = transformer.config_of_size(
    "nano", 4, vocab_size=300, max_length=32, token_types=2
)


@pytest.fixture(scope="module")
def model():
    return masked_lm.MaskedLM(TINY)


@pytest.fixture(scope="module")
def shapes(model):
    ids = jnp.zeros((1, TINY.max_length), jnp.int32)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), ids, ids == 0))[
        "params"
    ]


@pytest.fixture(scope="module")
def record():
    return bert.record()


def test_flops_are_those_of_the_traced_step(model, shapes):
    """A sequence shorter than the longest, in a batch of 3, with 5 masked tokens."""
    ids = jax.ShapeDtypeStruct((3, 16), jnp.int32)
    masked = jax.ShapeDtypeStruct((3, 5), jnp.int32)

    def loss(params, ids, masked):
        return jnp.sum(model.apply({"params": params}, ids, ids > 0, masked) ** 2)

    traced = count.flops(jax.grad(loss), shapes, ids, masked)
    assert bert.flops(TINY, 16, 5) == traced / 3


def test_parameters_and_fragments_are_those_of_the_model(shapes):
    assert bert.parameters(TINY) == count.parameters(shapes)
    for number in (1, 2, 4):
        parts = local_steps.split(shapes, number)
        expected = tuple(map(count.parameters, parts))
        assert bert.fragments(TINY, number) == expected


def test_parameters_of_the_published_sizes():
    """Hugging Face's BertForMaskedLM has as many, of both uncased models."""
    assert bert.parameters(bert.BASE.config) == 109_514_298
    assert bert.parameters(bert.LARGE.config) == 335_174_458


def test_tokens_are_those_of_the_recipes():
    assert bert.BASE.sequences == 256_000_000
    assert bert.BASE.tokens == 256 * (900_000 * 128 + 100_000 * 512)
    assert bert.LARGE.tokens == 7_038 * 65_536 * 128 + 1_563 * 32_768 * 512


@pytest.mark.parametrize(
    ("way", "codec"),
    [
        (bert.ACROSS[1], codecs.e3m0(256)),
        (bert.ACROSS[2], codecs.sparse_loco(64, 4096)),
    ],
)
def test_local_steps_are_settings_of_the_library(way, codec):
    fields = way.fields
    local_steps.Config(fields["inner_steps"], way.fragments, fields.get("delay", 0))
    assert all(each.config.layers % way.fragments == 0 for each in bert.RECIPES)
    values = {"x": jax.ShapeDtypeStruct((64, 4096), jnp.float32)}
    payload = codec_lib.payload_spec(codec, values)
    bits = 8 * codec_lib.nbytes(payload) / (64 * 4096)
    assert fields["bits_per_value"] == pytest.approx(bits, rel=0.01)


def row(record, recipe, way, line):
    (found,) = (
        each
        for each in record["rows"]
        if (each["recipe"], each["way"], each["line"]) == (recipe.name, way.name, line)
    )
    return found


def test_days_of_the_lamb_recipe_by_hand(record):
    """Its float32 gradients once a batch, at 10 Gbit/s, on T4-class devices."""
    gradients = 4 * 335_174_458
    inside = 1.5 * gradients / 10e9 + 6 * 10e-6
    between = 2 * 31 / 32 * gradients / 1.25e9 + 62 * 50e-6
    update = 7 * gradients / 320e9
    layer = 128 * (8 * 1024**2 + 4 * 1024 * 4096) + 4 * 128**2 * 1024
    first = 24 * layer + 20 * 2 * 1024 * (1024 + 30_522)
    layer = 512 * (8 * 1024**2 + 4 * 1024 * 4096) + 4 * 512**2 * 1024
    second = 24 * layer + 80 * 2 * 1024 * (1024 + 30_522)
    flop = 7_038 * 65_536 * 3 * first + 1_563 * 32_768 * 3 * second
    computing = flop / (128 * 0.3 * 65e12)
    waiting = 8_601 * (inside + between)
    seconds = computing + waiting + 8_601 * update
    found = row(record, bert.LARGE, bert.LADDER[1], "10 Gbit/s")
    device = found["devices"][0]
    assert device["days"] == pytest.approx(seconds / 86_400, rel=1e-9)
    assert device["device_hours"] == pytest.approx(128 * seconds / 3600, rel=1e-9)
    assert device["exposed_share"] == pytest.approx(waiting / seconds, rel=1e-9)
    assert found["bytes"] == pytest.approx(2 * 31 / 32 * gradients)


def test_accumulation_divides_the_bytes_of_a_batch(record):
    """512 sequences a device in micro-batches of 16, then 256 in micro-batches of 4."""
    often, once = (
        row(record, bert.LARGE, way, "1 Gbit/s")["bytes"] for way in bert.LADDER[:2]
    )
    assert often / once == pytest.approx((7_038 * 32 + 1_563 * 64) / 8_601)
    # A batch of 256 leaves 2 a device: one micro-batch.
    often, once = (
        row(record, bert.BASE, way, "1 Gbit/s")["bytes"] for way in bert.LADDER[:2]
    )
    assert often == once


def test_every_rung_and_every_faster_line_takes_no_longer(record):
    def days(recipe, way, rate):
        found = row(record, recipe, way, f"{rate} Gbit/s")
        return [each["days"] for each in found["devices"]]

    for recipe, rate in itertools.product(bert.RECIPES, bert.RATES):
        ladder = [days(recipe, way, rate) for way in bert.LADDER]
        for before, after in itertools.pairwise(ladder):
            assert all(b >= a for b, a in zip(before, after, strict=True))
    for recipe, way in itertools.product(bert.RECIPES, bert.LADDER):
        by_rate = [days(recipe, way, rate) for rate in bert.RATES]
        for before, after in itertools.pairwise(by_rate):
            assert all(b > a for b, a in zip(before, after, strict=True))


def test_on_a_slow_line_local_steps_take_what_a_cluster_alone_does(record):
    for recipe in bert.RECIPES:
        line = "2 clusters, 60 Mbit/s"
        whole, *local = (row(record, recipe, way, line) for way in bert.ACROSS)
        within = row(record, recipe, bert.LADDER[-1], "10 Gbit/s")["devices"][0]
        for each in local:
            assert each["bytes"] < whole["bytes"] / 100
            days = each["devices"][0]["days"]
            assert days == pytest.approx(within["days"], rel=0.02)
            assert days < whole["devices"][0]["days"] / 10
    # Half of the embeddings and layers' 4.125 bits, sent by two clusters in 100 steps.
    streaming = row(record, bert.LARGE, bert.ACROSS[1], line)
    assert streaming["bytes"] == pytest.approx(335_174_458 * 4.125 / 8 / 100)


def test_a_fragment_that_is_late_is_waited_for():
    """BERT-base's first one has the embeddings: 23 MB, for which 5 steps are too few
    on faster devices."""
    within = bert.cost(bert.BASE, bert.LARGER, bert.LADDER[-1], 10)
    across = bert.cost(bert.BASE, bert.LARGER, bert.ACROSS[1], 10, is_across=True)
    late = 45_100_800 * 4.125 / 8 / 7.5e6 + 0.015 - 5 * 0.37
    assert late > 1
    fewer = 31 / 32 - 15 / 16  # of a ring of half as many nodes
    gained = 1e6 * (2 * fewer * 2 * 109_514_298 / 1.25e9 + 32 * 50e-6)
    waited = across.exposed - within.exposed + gained
    assert waited == pytest.approx(1e4 * late, rel=0.05)


def test_the_record_is_json_and_its_text_has_all_of_it(record):
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    text = bert.markdown(record)
    for each in record["rows"]:
        assert f"| {each['way']} | {each['line']} |" in text
    assert all(f"- {each}" in text for each in record["assumptions"])
    assert "our assumption" in text
    assert "T4 class: days" in text
    assert "BERT-large, LAMB**: 335 M parameters, 512 M sequences" in text
    assert text == bert.markdown(json.loads(json.dumps(record)))
