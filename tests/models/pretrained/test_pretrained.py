import dataclasses
import json
import os
import stat

import jax
import ml_dtypes
import numpy as np
import oracle
import pytest
import safetensors.numpy
import tiny_nli
import trees

from nebula_jax.data import tokenizers
from nebula_jax.models import masked_lm, pretrained, transformer
from nebula_jax.models.pretrained import trimming

TOLERANCE = 1e-4  # the issue's, in float32; outputs are of order 1


def rename(folder, how):
    """Rewrites a checkpoint's tensors with `how` (dict -> dict)."""
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(how(safetensors.numpy.load_file(path)), path)


def assert_refused(folder, words):
    with pytest.raises(pretrained.PretrainedError, match=words):
        pretrained.load(folder)


@pytest.mark.parametrize("name", oracle.MODELS)
def test_a_checkpoint_of_each_family_answers_as_in_transformers(name, tmp_path):
    model = pretrained.load(oracle.write(tmp_path, name))
    assert model.family == oracle.MODELS[name][2]
    golden = oracle.golden(name)
    outputs = {key: golden[key] for key in golden.keys() & oracle.OUTPUTS}
    assert oracle.difference(oracle.ours(model), outputs) < TOLERANCE


@pytest.mark.parametrize("name", oracle.MODELS)
def test_a_checkpoint_goes_out_as_it_came_in(name, tmp_path):
    folder = oracle.write(tmp_path, name)
    model = pretrained.load(folder)
    pretrained.save(tmp_path / "out", model)
    trees.assert_same(
        safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"),
        safetensors.numpy.load_file(folder / "model.safetensors"),
    )
    again = pretrained.load(tmp_path / "out")
    assert again.config == model.config
    trees.assert_same(again.params, model.params)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [oracle.MODELS[name][0]]
    assert config.items() >= oracle.golden(name)["config"].items()


@pytest.mark.parametrize("mask", [0o002, 0o077])
def test_who_may_read_a_checkpoint_is_the_umasks_matter(mask, tmp_path):
    model = pretrained.load(oracle.write(tmp_path))
    before = os.umask(mask)
    try:
        pretrained.save(tmp_path / "out", model)
    finally:
        os.umask(before)
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path.name


def test_paddles_ernie_m_is_the_same_model(tmp_path):
    """Its matrices are [in, out], and attention is wrapped once less."""
    folder = oracle.write(tmp_path, "ernie_m")
    before = pretrained.load(folder)

    def as_paddle(tensors):
        return {
            "ernie_m." + name.replace("self_attn.self_attn", "self_attn"): (
                np.ascontiguousarray(array.T)
                if array.ndim == 2 and "embeddings" not in name
                else array
            )
            for name, array in tensors.items()
        }

    rename(folder, as_paddle)
    model = pretrained.load(folder)
    trees.assert_same(model.params, before.params)
    pretrained.save(tmp_path / "out", model)
    as_transformers = oracle.write(tmp_path / "again", "ernie_m")
    trees.assert_same(
        safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"),
        safetensors.numpy.load_file(as_transformers / "model.safetensors"),
    )


def test_bare_old_and_superfluous_names_are_understood(tmp_path):
    """As in google's own files: no prefix, gamma and beta, buffers, a tied copy."""
    folder = oracle.write(tmp_path, "bert")
    before = pretrained.load(folder)

    def older(tensors):
        tensors = {name.removeprefix("bert."): each for name, each in tensors.items()}
        tensors = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): each
            for name, each in tensors.items()
        }
        table = tensors["embeddings.word_embeddings.weight"]
        return tensors | {
            "embeddings.position_ids": np.arange(12)[None],
            "cls.predictions.decoder.weight": table,
            "cls.seq_relationship.bias": np.zeros(2, np.float32),
        }

    rename(folder, older)
    trees.assert_same(pretrained.load(folder).params, before.params)


def test_tensors_may_be_in_several_files(tmp_path):
    folder = oracle.write(tmp_path)
    before = pretrained.load(folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for part in (0, 1):
        some = {name: tensors[name] for name in sorted(tensors)[part::2]}
        safetensors.numpy.save_file(some, folder / f"part-{part}.safetensors")
        index |= {name: f"part-{part}.safetensors" for name in some}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    trees.assert_same(pretrained.load(folder).params, before.params)
    table = "bert.embeddings.word_embeddings.weight"
    old = {"bert.pooler.dense.bias": np.zeros(8, np.float32)}
    for extra in (old, {table: tensors[table] + 1}):  # of no index, of another file
        part = next(each for each in index.values() if each != index[table])
        named = {name: tensors[name] for name in index if index[name] == part}
        safetensors.numpy.save_file(named | extra, folder / part)
        assert_refused(folder, "other tensors than")
        safetensors.numpy.save_file(named, folder / part)
    path.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert_refused(folder, "names a file outside")
    path.write_text(json.dumps({"weight_map": {"a": 5}}))
    assert_refused(folder, "5: No such file")


def test_a_fine_tuned_models_head_is_left_out_with_a_word(tmp_path):
    folder = oracle.write(tmp_path, architectures=["BertForSequenceClassification"])
    before = pretrained.load(folder)
    head = {"classifier.weight": np.zeros((3, 8), np.float32)}
    rename(folder, lambda tensors: tensors | head)
    said = []
    trees.assert_same(pretrained.load(folder, log=said.append).params, before.params)
    words = "classifier.weight, of a fine-tuned model's head, is left out"
    assert said == [f"{folder}: {words}"]


PREDICTS = "cls.predictions.decoder.weight"
INT8, OWN_TABLE = np.ones((8, 12), np.int8), np.zeros((23, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda old: {f"module.{name}": old[name] for name in old}, "with 'module."),
        (lambda old: {f"_orig_mod.{name}": old[name] for name in old}, "_orig_mod.be"),
        (
            lambda old: old | {"bert.encoder.layer.0.output.dense.weight": INT8},
            "encoder.layer.0.output.dense.weight is int8",
        ),
        (lambda old: old | {PREDICTS: OWN_TABLE}, "is not the embedding table"),
    ],
)
def test_tensors_that_are_no_models_are_refused_in_a_sentence(tmp_path, change, words):
    """Of a wrapper, quantized, or with an output layer of its own."""
    folder = oracle.write(tmp_path)
    rename(folder, change)
    assert_refused(folder, words)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_weights_of_eight_bits_are_refused_in_a_sentence(tmp_path, dtype):
    head = json.dumps({"a": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2]}})
    data = len(head).to_bytes(8, "little") + head.encode() + b"\1\2"
    (oracle.write(tmp_path) / "model.safetensors").write_bytes(data)
    with pytest.raises(pretrained.PretrainedError, match=r"float8_e\w+; convert them"):
        pretrained.load(tmp_path / "checkpoint")


def test_all_that_does_not_fit_is_listed_at_once(tmp_path):
    folder = oracle.write(tmp_path, hidden_size=16)

    def damage(tensors):
        del tensors["bert.encoder.layer.1.output.dense.bias"]
        return tensors | {"adapter.weight": np.zeros((3, 8), np.float32)}

    rename(folder, damage)
    with pytest.raises(pretrained.PretrainedError) as caught:
        pretrained.load(folder)
    text = str(caught.value)
    assert "missing: encoder.layer.1.output.dense.bias;" in text
    assert "unexpected: adapter.weight;" in text
    assert "embeddings.position_embeddings.weight is [12, 8], expected [12, 16]" in text
    assert text.endswith("expected [2, 16] and 34 more")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; known are bert, xlm-roberta"),
        ({"model_type": ["bert"]}, r"model_type \['bert'\]; known are"),
        ({"model_type": None, "architectures": 5}, "model_type None; known are"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; our encoder has gelu only"),
        ({"is_decoder": True}, "is_decoder is True; our encoder has none of it"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map is {'AutoModel': 'own"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4};"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is .* has none of it"),
        ({"position_embedding_type": "relative_key"}, "our encoder has absolute only"),
        ({"hidden_size": "8"}, "hidden_size is '8', not a number from 1 to 10,000,"),
        ({"hidden_size": 0}, "hidden_size is 0, not a number from 1 to"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a number"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, not a number from 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_attention_heads": 3}, "width 8 with 3 heads"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"num_hidden_layers": 1}, r"unexpected: encoder\.layer\.1\.attention"),
    ],
)
def test_a_config_that_is_not_its_models_is_named(change, message, tmp_path):
    assert_refused(oracle.write(tmp_path, **change), message)


TRANSFORMERS_5 = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_theta": 160_000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "global_attn_every_n_layers": 3,  # which is not read beside the types
}
"""What transformers 5 writes of the golden ModernBERT."""


def test_a_modernbert_of_transformers_5_is_that_of_transformers_4(tmp_path):
    before = pretrained.load(oracle.write(tmp_path / "4", "modernbert"))
    new = oracle.write(tmp_path / "5", "modernbert", **TRANSFORMERS_5)
    after = pretrained.load(new)
    assert after.config == before.config
    pretrained.save(tmp_path / "out", trimming.first_layers(after, 2))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["global_attn_every_n_layers"] == 2
    assert not {"layer_types", "rope_parameters"} & written.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "in the first of 3 layers and"),
        ({"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\];"),
        ({"layer_types": 3}, "layer_types is 3; our encoder has full_attention in"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "0.0}}; our"),
    ],
)
def test_layers_that_our_body_does_not_have_are_refused(change, message, tmp_path):
    folder = oracle.write(tmp_path, "modernbert", **TRANSFORMERS_5 | change)
    assert_refused(folder, message)


@pytest.mark.parametrize(
    ("name", "family", "epsilon"),
    [
        ("xlm_roberta", "xlm_roberta", 1e-12),
        ("ernie_m", "ernie_m", 1e-5),
        ("electra_generator", "electra", 1e-12),
    ],
)
def test_a_config_may_name_its_architecture_alone(name, family, epsilon, tmp_path):
    """Its epsilon is then what transformers takes."""
    folder = oracle.write(tmp_path, name, model_type=None)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("layer_norm_eps", None)
    path.write_text(json.dumps(config))
    model = pretrained.load(folder)
    assert (model.family, model.config.layer_norm_epsilon) == (family, epsilon)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    assert_refused(tmp_path / "none", "none is no folder")
    assert_refused(tmp_path, r"config\.json: No such file")
    folder = oracle.write(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = r"no model\.safetensors; pytorch_model\.bin is there"
    assert_refused(folder, message)
    (folder / "config.json").write_text("{")
    assert_refused(folder, r"config\.json is no JSON")
    (folder / "config.json").write_text("[]")
    assert_refused(folder, "no JSON object")


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_file_cut_short_is_named(kept, tmp_path):
    folder = oracle.write(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(pretrained.PretrainedError, match="no whole safetensors") as e:
        pretrained.load(folder)
    assert "\n" not in str(e.value)


def test_an_output_layer_of_its_own_that_is_not_there_is_refused(tmp_path):
    folder = oracle.write(tmp_path, tie_word_embeddings=False)
    assert_refused(folder, "output layer is not there")
    table = "bert.embeddings.word_embeddings.weight"
    layer = "cls.predictions.decoder.weight"
    rename(folder, lambda tensors: tensors | {layer: tensors[table]})
    assert "mlm_head" in pretrained.load(folder).params
    rename(
        folder, lambda tensors: {k: v for k, v in tensors.items() if k[:4] != "cls."}
    )
    assert "mlm_head" not in pretrained.load(folder).params


def test_positions_may_be_cut(tmp_path):
    folder = oracle.write(tmp_path, "xlm_roberta")
    whole = pretrained.load(folder)
    assert whole.config.max_length == 10  # 12 rows, two of which no position has
    short = pretrained.load(folder, max_length=6, dropout=0.1, dtype="bfloat16")
    assert short.config == dataclasses.replace(
        whole.config, max_length=6, dropout=0.1, dtype="bfloat16"
    )
    exact = short._replace(config=dataclasses.replace(whole.config, max_length=6))
    assert oracle.difference(oracle.ours(exact), oracle.ours(whole)) == 0
    with pytest.raises(pretrained.PretrainedError, match="has 10 positions; 11"):
        pretrained.load(folder, max_length=11)


def test_what_was_trained_here_goes_out_as_electra(tmp_path):
    """The discriminator of M3, without its CLM head, which ELECTRA has no name for."""
    config = transformer.config_of_size("nano", vocab_size=40, max_length=16)
    ids, mask = np.ones((1, 16), np.int32), np.ones((1, 16), bool)
    params = jax.tree.map(
        lambda leaf: np.random.RandomState(0).randn(*leaf.shape).astype(np.float32),
        jax.eval_shape(
            masked_lm.Discriminator(config).init,
            jax.random.key(0),
            ids,
            mask,
            ids[:, :2],
        )["params"],
    )
    model = pretrained.Pretrained("electra", config, params, {})
    with pytest.raises(pretrained.PretrainedError, match="no name for clm_head/bias"):
        pretrained.save(tmp_path, model)
    with pytest.raises(pretrained.PretrainedError, match="counts positions from 2"):
        pretrained.save(tmp_path, model._replace(family="ernie_m"))
    del params["clm_head"]
    params["rtd_head"]["output"]["bias"][0] = np.nan
    with pytest.raises(pretrained.PretrainedError, match="output/bias is not finite"):
        pretrained.save(tmp_path, model)
    assert not list(tmp_path.iterdir())
    params["rtd_head"]["output"]["bias"][0] = 0.5
    pretrained.save(tmp_path, model)
    again = pretrained.load(tmp_path)
    assert set(again.params) == {"embeddings", "encoder", "rtd_head"}
    types = again.params["embeddings"].pop("token_type_embeddings")["embedding"]
    np.testing.assert_array_equal(types, np.zeros((1, 64)))  # it adds nothing
    trees.assert_same(again.params, params)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float64])
def test_weights_of_any_floating_point_type_are_read(tmp_path, dtype):
    folder = oracle.write(tmp_path)
    before = pretrained.load(folder)
    rename(folder, lambda each: {name: x.astype(dtype) for name, x in each.items()})
    after = pretrained.load(folder)
    for ours, theirs in zip(*map(jax.tree.leaves, (after, before)), strict=True):
        if isinstance(ours, np.ndarray):
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours, theirs.astype(dtype).astype("f4"))


@pytest.mark.parametrize(
    ("name", "said", "kind", "pads"),
    [
        ("bert", "XLMRobertaTokenizerFast", "XLMRobertaTokenizerFast", "<pad>"),
        ("bert", "BertTokenizer", "BertTokenizer", "[PAD]"),
        ("xlm_roberta", None, "XLMRobertaTokenizer", "<pad>"),
        ("electra_generator", None, "ElectraTokenizer", "[PAD]"),
        ("ernie_m", None, "ErnieMTokenizer", "[PAD]"),
    ],
)
def test_a_tokenizer_of_another_kind_is_noticed(tmp_path, name, said, kind, pads):
    given = {"tokenizer_class": said} if said else {}
    model = pretrained.load(oracle.write(tmp_path, name, **given))
    other = {"<pad>": "[PAD]", "[PAD]": "<pad>"}[pads]

    class Tokenizer:
        size, special = 20, tokenizers.SpecialTokens(1, 0, 2, 3, 4, size=20)
        piece = {1: pads}.get

    pretrained.check_tokenizer(model, Tokenizer)  # three rows to spare
    Tokenizer.piece = {1: other}.get
    with pytest.raises(pretrained.PretrainedError, match=f"is {kind}, which"):
        pretrained.check_tokenizer(model, Tokenizer)


@pytest.fixture
def folder(tmp_path):
    return tiny_nli.write_model(tmp_path / "model")


def test_a_folder_without_its_tokenizer_is_refused(folder):
    vocabulary = folder / "vocab.txt"
    pieces = vocabulary.read_text()
    vocabulary.unlink()
    with pytest.raises(tokenizers.NoTokenizerError, match="has no tokenizer"):
        pretrained.load_with_tokenizer(folder)
    vocabulary.write_text(f"{pieces}more\n")
    with pytest.raises(pretrained.PretrainedError, match="is not that of a model"):
        pretrained.load_with_tokenizer(folder)
