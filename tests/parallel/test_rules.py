import re

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util
from jax.sharding import PartitionSpec

from nebula_jax import errors
from nebula_jax.models import modern, transformer
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules
from nebula_jax.training import m3


def specs(tree, fsdp=2, model_parallel=2):
    mesh = mesh_lib.make_mesh(jax.devices(), fsdp, model_parallel)
    return jax.tree.map(
        lambda leaf: leaf.spec, rules.shardings(mesh, rules.RULES, tree)
    )


def test_parameters_and_their_moments_are_split_alike():
    model = transformer.config_of_size("nano", vocab_size=64, max_length=16)
    config = m3.Config(model, model, steps=5)
    found = specs(jax.eval_shape(lambda: m3.init_discriminator(config, 0)))
    block = found.params["encoder"]["layer_0"]
    query = block["attention"]["query"]
    assert query["kernel"] == PartitionSpec("fsdp", "model", None)
    assert query["bias"] == PartitionSpec("model", None)
    attended = block["attention"]["output"]
    assert attended["kernel"] == PartitionSpec("model", None, "fsdp")
    assert block["intermediate"]["kernel"] == PartitionSpec("fsdp", "model")
    assert block["intermediate"]["bias"] == PartitionSpec("model")
    assert block["output"]["kernel"] == PartitionSpec("model", "fsdp")
    assert block["output"]["bias"] == PartitionSpec()
    table = found.params["embeddings"]["word_embeddings"]["embedding"]
    assert table == PartitionSpec("model", "fsdp")
    assert found.params["clm_head"]["bias"] == PartitionSpec("model")
    assert found.params["rtd_head"]["dense"]["kernel"] == PartitionSpec()
    moments = found.opt_state[1].mu
    assert jax.tree.leaves(moments) == jax.tree.leaves(found.params)
    assert found.step == PartitionSpec()


def test_every_matrix_of_a_modern_body_is_split():
    body = modern.Body()
    model = transformer.config_of_size("nano", body=body, vocab_size=64, max_length=16)
    config = m3.Config(model, model, steps=5)
    state = jax.eval_shape(lambda: m3.init_discriminator(config, 0))
    placed, encoder = specs(state).params["encoder"], state.params["encoder"]
    for name, spec in traverse_util.flatten_dict(placed, sep="/").items():
        is_split = {"fsdp", "model"} <= set(spec)
        assert is_split == name.endswith("/kernel"), name
    assert {"intermediate", "gate", "output"} <= set(encoder["layer_1"])
    assert not [name for name in traverse_util.flatten_dict(encoder) if "bias" in name]


def table(rows, width):
    return {"word_embeddings": {"embedding": jnp.zeros((rows, width))}}


def test_an_axis_that_fsdp_does_not_divide_stays_whole():
    found = specs(table(64, 7))
    assert found["word_embeddings"]["embedding"] == PartitionSpec("model", None)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (table(63, 8), "=4 does not divide the 63 pieces of the vocabulary of word"),
        (
            {"attention": {"query": {"kernel": jnp.zeros((8, 6, 2))}}},
            "model_parallel=4 does not divide the 6 heads of attention/query/kernel;"
            " 3 does",
        ),
    ],
)
def test_what_model_parallel_does_not_divide_is_refused(tree, words):
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        specs(tree, 1, 4)


def test_the_first_rule_that_matches_counts():
    own = (
        rules.Rule("kernel$", PartitionSpec("model"), "columns"),
        rules.Rule("kernel", PartitionSpec("fsdp")),
    )
    mesh = mesh_lib.make_mesh(jax.devices()[:2], model_parallel=2)
    assert rules.spec_of(own, mesh, "a/kernel", (4, 4)) == PartitionSpec("model")
    assert rules.spec_of(own, mesh, "a/kernel_2", (4,)) == PartitionSpec("fsdp")
    assert rules.spec_of(own, mesh, "a/bias", (4,)) == PartitionSpec()
