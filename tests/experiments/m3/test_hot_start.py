"""M3 that begins with a pretrained encoder, and leaves one (section 4.1)."""

import json

import configured
import drawn
import jax
import numpy as np
import pytest
import tiny_hot_start
import tiny_nli
import tiny_runs
import trees
from absl import flags
from absl.testing import flagsaver

from experiments.m3 import config, models
from nebula_jax import errors
from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import masked_lm, pretrained
from nebula_jax.models.pretrained import trimming

CLUSTERS = ("generator-0", "generator-1", "discriminator")
LAYERS = 1  # of a generator: a quarter, but at least one


@pytest.fixture(scope="module")
def checkpoint(runs):
    """A checkpoint that was trimmed before, in the place of one as it comes."""
    whole = tiny_hot_start.write_model(runs.folder / "models" / "whole")
    words = tokenizers.load(whole)
    used = [
        words.encode(word)[0]
        for word in tiny_hot_start.WORDS + tiny_hot_start.UNSAID[4:]
    ]
    keep = tokenizers.kept_ids(words, used)
    folder = runs.folder / "models" / "bert"
    pretrained.save(folder, trimming.trim(pretrained.load(whole), keep))
    tokenizers.save(folder, tokenizers.trim(words, keep))
    return folder


@pytest.fixture(scope="module")
def vocabulary(runs, checkpoint):
    """The vocabulary for real clusters, as the script makes it."""
    given = {"hot_start": str(checkpoint), "data_dir": str(runs.text)}
    given["generators"] = "en de|sw"
    out = runs.folder / "shared_vocabulary"
    made = tiny_hot_start.vocabulary(out, **given)
    with pytest.raises(errors.SettingsError, match="is there already"):
        tiny_hot_start.vocabulary(out, **given)
    return made


def test_both_sides_begin_with_the_encoder(checkpoint, vocabulary):
    length = tiny_hot_start.LENGTH
    run = configured.run(config, hot_start=checkpoint, max_length=length)
    made = models.load(run, vocabulary)
    whole = pretrained.load(checkpoint).params
    rows = np.searchsorted(
        tokenizers.load(checkpoint).old_ids, vocabulary.rows
    )  # both count from the pieces of the one that was trimmed
    for params, layers in ((made.generator, LAYERS), (made.discriminator, 2)):
        table = whole["embeddings"]["word_embeddings"]["embedding"]
        np.testing.assert_array_equal(
            params["embeddings"]["word_embeddings"]["embedding"], table[rows]
        )
        assert len(params["encoder"]) == layers
        for name, layer in params["encoder"].items():
            jax.tree.map(np.testing.assert_array_equal, layer, whole["encoder"][name])


@pytest.mark.slow
def test_a_run_begins_with_it_and_leaves_it(runs, checkpoint):
    """Nothing is learned at rate 0; generators have heads of their own."""
    workdir = "hot"
    output = runs.finished(
        task_mix="mrtd",  # sooner compiled
        hot_start="models/bert",
        generator_layers=0,
        discriminator_layers=0,
        max_length=tiny_hot_start.LENGTH,
        steps=2,
        learning_rate=0,
        workdir=workdir,
        temperature=1.5,
    )
    before = pretrained.load(checkpoint)
    params = {name: runs.state(workdir, name, 2)["params"] for name in CLUSTERS}
    for name, layers in zip(CLUSTERS, (LAYERS, LAYERS, 2), strict=True):
        encoder = params[name]["encoder"]
        assert len(encoder) == layers
        for layer in encoder:
            trees.assert_same(encoder[layer], before.params["encoder"][layer])
    first, second = (params[name]["mlm_head"] for name in CLUSTERS[:2])
    assert np.any(first["dense"]["kernel"] != second["dense"]["kernel"])
    # The fake token rate is told from the first step.
    summary = json.loads((runs.folder / workdir / "summary.json").read_text())
    assert [each["step"] for each in summary["held_out"]] == [0, 2]
    for each in summary["held_out"]:
        assert 0 < each["languages"]["en"]["fake_token_rate"] < 0.5
    assert "Held-out text after step 2 (in brackets: 0;" in output
    (folder,) = (runs.folder / workdir).glob("*/encoder")
    assert tokenizers.load(folder).digest == tokenizers.load(checkpoint).digest
    trees.assert_same(pretrained.load(folder).params, before.params)


@pytest.mark.parametrize("family", ["ernie_m", "xlm_roberta", "modernbert"])
def test_the_encoder_that_is_left_is_a_checkpoint_of_all_pieces(tmp_path, family):
    """Twice what it was: the pieces that the text has, its positions (XLM-R counts them
    from 2, ModernBERT has no table of them), and all layers."""
    before, after, vocabulary = tiny_hot_start.left_of(
        tmp_path, family, lambda params: jax.tree.map(lambda leaf: 2 * leaf, params)
    )
    assert tokenizers.load(after).digest == tokenizers.load(before).digest
    first, left = pretrained.load(before), pretrained.load(after)
    assert left.family == first.family == family
    assert left.config == first.config
    rows = vocabularies.load(vocabulary).rows
    trained = first.config.position_offset + tiny_hot_start.LENGTH
    for name, used in (
        ("word_embeddings", rows),
        ("position_embeddings", np.arange(trained)),
    ):
        if name not in first.params["embeddings"]:
            continue
        old, new = (
            each.params["embeddings"][name]["embedding"] for each in (first, left)
        )
        assert 5 < len(used) < len(old)
        factor = np.ones((len(old), 1), np.float32)
        factor[used] = 2
        np.testing.assert_array_equal(new, factor * old)
    jax.tree.map(
        lambda new, old: np.testing.assert_array_equal(new, 2 * old),
        left.params["encoder"],
        first.params["encoder"],
    )


def test_disentangled_embeddings_go_out_as_one_table(tmp_path):
    vocabularies.train([f"das Haus {n}" for n in range(60)], 40, tmp_path / "pieces")
    words = vocabularies.load(tmp_path / "pieces")
    sizes = {"discriminator_size": "nano", "discriminator_layers": 1}
    run = configured.run(config, disentangled=True, generators="de", **sizes)
    made = models.load(run, words)
    assert not made.config.generator.disentangled
    ids = np.zeros((1, 64), np.int32)
    module = masked_lm.Discriminator(made.config.discriminator)
    params = drawn.params(module, ids, ids == 0, ids[:, :9])
    models.export(tmp_path, run, made, words, params)
    left = pretrained.load(tmp_path / "encoder").params["embeddings"]
    own, deltas = (
        params["embeddings"][name]["embedding"]
        for name in ("word_embeddings", "word_deltas")
    )
    np.testing.assert_array_equal(left["word_embeddings"]["embedding"], own + deltas)


def test_layers_are_those_of_the_size_or_as_many_as_were_asked_for(vocabulary):
    words = vocabulary._replace(rows=None)
    for asked, want in ((0, [2, 4]), (3, [3, 4])):
        run = configured.run(
            config,
            generator_size="nano",
            discriminator_size="mini",
            generator_layers=asked,
            fsdp=2,
            pipeline=4,
        )
        made = models.load(run, words).config
        assert [made.generator.layers, made.discriminator.layers] == want
        assert (made.generator.width, made.discriminator.width) == (64, 256)
        assert (made.generator.pipeline, made.discriminator.pipeline) == (4, 4)


def test_what_does_not_fit_the_encoder_is_refused(runs, checkpoint, vocabulary):
    """Before anything starts, and in words."""
    own = vocabulary
    other = tiny_nli.write_model(runs.folder / "models" / "other", words=["the"])
    narrow = runs.folder / "models" / "narrow"
    narrow.mkdir()
    about = json.loads((checkpoint / "config.json").read_text())
    about |= {"model_type": "electra", "embedding_size": about["hidden_size"] // 2}
    (narrow / "config.json").write_text(json.dumps(about))
    flags.FLAGS(["test"])
    with pytest.raises(errors.SettingsError, match="name the model with"):
        models.load(config.from_flags(), own)
    for given_flags, message in (
        ({"hot_start": str(other)}, "is not the tokenizer of --hot_start=.*other"),
        ({"hot_start": "models/nothing"}, "models/nothing"),
        ({"hot_start": str(checkpoint), "generator_layers": 3}, "bert has 2"),
        ({"hot_start": str(checkpoint), "max_length": 17}, "bert has 16"),
        ({"hot_start": str(narrow)}, "narrow: its embeddings are narrower"),
        (
            {"hot_start": str(checkpoint), "disentangled": True},
            "--disentangled is for a discriminator that begins with random weights",
        ),
        ({"hot_start": str(checkpoint), "body": "modern"}, "another form of layers"),
    ):
        refused = pytest.raises(errors.NebulaError, match=message)
        with flagsaver.flagsaver(**{"max_length": 16} | given_flags), refused:
            run = config.from_flags()
            config.check(run)
            models.load(run, own)


def test_a_vocabulary_is_made_of_given_languages_or_of_all(tmp_path, capsys):
    common = {"data_dir": str(tiny_runs.write_text(tmp_path / "text"))}
    common |= {"vocab_size": 60}
    digests = []
    for given in ({"generators": "de en|sw"}, {"languages": ["all"]}):
        out = tmp_path / f"{len(digests)}.model"
        digests.append(tiny_hot_start.vocabulary(out, **common, **given).digest)
        assert "60 pieces, de, en, sw" in capsys.readouterr().out
    assert digests[0] == digests[1]


def test_each_side_begins_with_a_checkpoint_of_its_own(tmp_path):
    """Section 4.1: a base model in the generator, a large one in the discriminator."""
    small, large = tmp_path / "small", tmp_path / "large"
    tiny_hot_start.write_model(small, seed=1, layers=1)
    tiny_hot_start.write_model(large, seed=2, layers=3)
    given = {
        "data_dir": str(tiny_runs.write_text(tmp_path / "text")),
        "generators": "en de|sw",
        "max_length": tiny_hot_start.LENGTH,
    }
    vocabulary = tiny_hot_start.vocabulary(
        tmp_path / "v", hot_start=str(large), **given
    )
    given |= {"generator_start": str(small), "discriminator_start": str(large)}
    run = configured.run(config, **given)
    config.check(run)
    made = models.load(run, vocabulary)
    assert (made.config.generator.layers, made.config.discriminator.layers) == (1, 3)
    for side, flag in (
        (made.generator, "generator_start"),
        (made.discriminator, "discriminator_start"),
    ):
        whole = pretrained.load(given[flag]).params["encoder"]
        jax.tree.map(np.testing.assert_array_equal, side["encoder"], whole)
    both = config.settings(run, vocabulary)
    assert both["--hot_start"] != both["--generator_start"]
    described = models.describe(run, made)
    assert described["generator_start"] == given["generator_start"]
    fewer = configured.run(config, **given, generator_layers=2)
    with pytest.raises(errors.SettingsError, match="generator_layers=2:"):
        config.check(fewer)
    alone = configured.run(config, **given | {"discriminator_start": ""})
    with pytest.raises(errors.SettingsError, match="go together"):
        config.check(alone)
