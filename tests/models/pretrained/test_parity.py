"""Models against transformers itself; needs requirements-parity.txt, else skipped."""

import json
import pathlib
import shutil

import configured
import jax
import numpy as np
import oracle
import pytest
import tiny_hot_start
import tiny_nli
from flax import traverse_util

from experiments.m3 import config as m3_config
from experiments.pretraining import hot_start
from experiments.xnli import models
from nebula_jax.data import nli, ragged_rows, tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import classifier, modern, pretrained, transformer
from nebula_jax.models.pretrained import names, packages, tree, trimming
from nebula_jax.training import classification

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57")
# torch's own, of what transformers' ModernBERT imports of it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

TOLERANCE = 1e-4  # the issue's, in float32
PREPARED = pathlib.Path(__file__).parents[3] / "pretrained"
TEXTS = ("The cat doesn't sit on the mat.", "¿Verdad?", "我爱你, 3,000 libros.")


def drawn(seed):
    """A shape; 0 for the golden files' own."""
    if not seed:
        return {}
    random = np.random.RandomState(seed)
    heads = int(random.choice([1, 2, 3]))
    return {
        "num_hidden_layers": int(random.randint(1, 4)),
        "num_attention_heads": heads,
        # Not 2: what layer norm makes of two numbers hangs on their last bits.
        "hidden_size": heads * int(random.choice([6, 8, 12])),
        "intermediate_size": int(random.randint(5, 30)),
        "max_position_embeddings": int(random.randint(9, 20)),
        "layer_norm_eps": float(random.choice([1e-12, 1e-5, 1e-3])),
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", oracle.MODELS)
def test_what_transformers_wrote_we_read_and_the_other_way_round(name, seed, tmp_path):
    theirs, _ = oracle.build(name, **drawn(seed))
    theirs.save_pretrained(tmp_path / "theirs")
    model = pretrained.load(tmp_path / "theirs")
    outputs = oracle.ours(model)
    assert oracle.difference(outputs, oracle.theirs(theirs)) < TOLERANCE

    pretrained.save(tmp_path / "ours", model)
    again, info = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert oracle.difference(outputs, oracle.theirs(again)) < TOLERANCE


@pytest.mark.parametrize("name", oracle.MODELS)
def test_golden_files_are_what_transformers_says_today(name):
    model, tensors = oracle.build(name)
    golden = oracle.golden(name)
    assert golden["tensors"] == tensors
    for key, value in oracle.theirs(model).items():
        np.testing.assert_allclose(golden[key], value, atol=2e-5)


def drawn_model(family, size, **fields):
    """An encoder of a family with weights that depend on their names."""
    config = transformer.Config(
        vocab_size=size,
        layers=2,
        width=8,
        heads=4,
        feed_forward=12,
        max_length=64,
        position_offset=names.FAMILIES[family].position_offset,
        **fields,
    )
    params = traverse_util.unflatten_dict(
        {
            path: oracle.weights(path, shape)
            for path, shape in tree.shapes(config).items()
            if tree.part_of(path) in ("embeddings", "encoder")
        },
        sep="/",
    )
    return pretrained.Pretrained(family, config, params, {})


def left_by_m3(tmp_path, family="electra"):
    """The folder that M3 leaves after a run from scratch, with a vocabulary of ours."""
    path = tmp_path / "vocabulary"
    vocabularies.train([f"{text} {n}" for n in range(60) for text in TEXTS], 200, path)
    vocabulary = vocabularies.load(path)
    body = modern.Body() if family == "modernbert" else None
    _, shape, params, _ = drawn_model(family, vocabulary.size, body=body)
    run = configured.run(m3_config)
    left = (run.agreed, run.local, shape, vocabulary, params, [["en"], ["es", "zh"]])
    hot_start.write(tmp_path, *left)
    return tmp_path / hot_start.FOLDER


@pytest.mark.parametrize("family", ["electra", "modernbert"])
def test_transformers_reads_the_encoder_that_m3_leaves(family, tmp_path):
    folder = left_by_m3(tmp_path, family)
    theirs, info = transformers.AutoModel.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours = oracle.ours(pretrained.load(folder))
    assert oracle.difference(ours, oracle.theirs(theirs)) < TOLERANCE


@pytest.mark.parametrize("family", ["electra", "modernbert"])
def test_transformers_reads_the_vocabulary_that_m3_leaves(family, tmp_path):
    folder = left_by_m3(tmp_path, family)
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(folder),
        tokenizers.load(folder),
    )
    wanted = ours.encode_batch(TEXTS)
    assert theirs(list(TEXTS), add_special_tokens=False)["input_ids"] == wanted
    assert theirs.model_max_length == 64
    assert (theirs.pad_token_id, theirs.mask_token_id) == (0, 4)
    hidden = transformers.pipeline("feature-extraction", str(folder))(TEXTS[0])
    assert np.shape(hidden) == (1, len(wanted[0]) + 2, 8)


GOLDENS = pathlib.Path(__file__).parents[2] / "data" / "tokenizers" / "goldens"
PIECES = {"sentencepiece.bpe.model": "sentencepiece.bpe.model"}
# Family -> its files of a tokenizer, token types.
CLASSIFIERS = {
    "bert": ({"bert_vocab.txt": "vocab.txt"}, 2),
    "xlm_roberta": (PIECES, 1),
    "ernie_m": (PIECES | {"ernie_m_vocab.txt": "vocab.txt"}, 0),
    "electra": ({"bert_vocab.txt": "vocab.txt"}, 2),
    "m3": None,  # and then its own
}


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_pipeline_of_transformers_has_the_probabilities_of_a_fine_tuned_model(
    family, tmp_path
):
    """Of pairs that it tokenizes itself."""
    if family == "m3":
        model, tokenizer = pretrained.load_with_tokenizer(left_by_m3(tmp_path))
    else:
        files, types = CLASSIFIERS[family]
        for source, target in files.items():
            shutil.copy(GOLDENS / source, tmp_path / target)
        tokenizer = tokenizers.load(tmp_path)
        model = drawn_model(family, tokenizer.size, token_types=types)
    shape = classifier.config(model, tokenizer)
    params = classifier.init(shape, jax.random.key(0), model)
    params["classifier"] = jax.tree.map(
        # Large: the first positions of two pairs differ little before any training.
        lambda leaf: 10 * oracle.weights(str(leaf.shape), leaf.shape),
        params["classifier"],
    )
    trained = models.Trained(params, np.arange(tokenizer.size), 1)
    folder = tmp_path / "left"
    left = trained.as_checkpoint(model, "cls")
    pretrained.save(folder, left)
    tokenizers.save(folder, tokenizer)

    is_doubled = ragged_rows.has_double_separator(tokenizer, model.config.token_types)
    first, second = TEXTS, TEXTS[1:] + TEXTS[:1]
    rows = ragged_rows.tokenize_pairs(
        list("123"), first, second, tokenizer, 64, separators=2 if is_doubled else 1
    )
    ids = rows.rows(np.arange(3), 64, tokenizer.special.pad)
    ours = np.asarray(classification.predict(shape, params, ids))
    pipeline = transformers.pipeline("text-classification", str(folder), top_k=None)
    for row, text, text_pair in zip(ours, first, second, strict=True):
        theirs = pipeline({"text": text, "text_pair": text_pair})
        found = {each["label"]: each["score"] for each in theirs}
        assert found.keys() == set(nli.LABELS)
        wanted = [found[label] for label in nli.LABELS]
        np.testing.assert_allclose(row, wanted, atol=1e-5)
    assert np.ptp(ours, axis=0).max() > 1e-3


def test_nothing_is_made_up_in_a_fine_tuned_model(tmp_path):
    """Nor left over: every tensor of the file is one of the class's."""
    for family in ("bert", "xlm_roberta", "ernie_m"):
        model = drawn_model(family, 23, token_types=0 if family == "ernie_m" else 2)
        head = {
            name: {"kernel": np.ones((8, size)), "bias": np.ones(size)}
            for name, size in (("dense", 8), ("output", 3))
        }
        params = model.params | {"classifier_head": head}
        metadata = models.LABELS | {"pad_token_id": 1}
        pretrained.save(
            tmp_path / family, model._replace(params=params, metadata=metadata)
        )
        about = json.loads((tmp_path / family / "config.json").read_text())
        made = oracle.transformers_class(about["architectures"][0])
        theirs, info = made.from_pretrained(tmp_path / family, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert theirs.num_labels == 3


def test_transformers_finds_no_tokenizer_beside_a_trimmed_model(tmp_path):
    """Else it would give the untrimmed one's ids, which are other rows or none."""
    whole = tiny_nli.write_model(tmp_path / "whole")
    tokenizer = tokenizers.load(whole)
    keep = tokenizers.kept_ids(tokenizer, range(9))
    pretrained.save(tmp_path / "less", trimming.trim(pretrained.load(whole), keep))
    tokenizers.save(tmp_path / "less", tokenizers.trim(tokenizer, keep))
    assert transformers.AutoModel.from_pretrained(tmp_path / "less")
    assert transformers.AutoTokenizer.from_pretrained(whole)
    with pytest.raises((OSError, ValueError, TypeError)):
        transformers.AutoTokenizer.from_pretrained(tmp_path / "less")


@pytest.mark.parametrize("family", ["bert", "xlm_roberta", "ernie_m", "modernbert"])
def test_transformers_reads_what_a_hot_started_m3_leaves(family, tmp_path, monkeypatch):
    """All pieces and positions, those of the text and the layers anew."""
    _, folder, vocabulary = tiny_hot_start.left_of(
        tmp_path, family, lambda params: jax.tree.map(np.negative, params)
    )
    theirs, info = transformers.AutoModel.from_pretrained(
        folder, output_loading_info=True
    )
    # Poolers are no part of what M3 trains; transformers makes one up.
    assert all("pooler" in name for name in info["missing_keys"])
    assert not info["unexpected_keys"]
    # No piece is 1: transformers' XLM-R takes that for padding and does not count it.
    ids = np.arange(2, 14, dtype=np.int32).reshape(2, 6)
    said = np.isin(ids, vocabularies.load(vocabulary).rows)
    assert said.any()
    assert not said.all()
    monkeypatch.setattr(oracle, "INPUT_IDS", ids)
    ours = oracle.ours(pretrained.load(folder))
    theirs = oracle.theirs(theirs)
    theirs.pop("pooled", None)
    assert oracle.difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("name", packages.MODELS)
def test_real_weights_answer_as_in_transformers(name, monkeypatch):
    folder = PREPARED / name
    if not folder.exists():
        pytest.skip(f"python -m scripts.prepare_pretrained --model={name} first")
    tokenizer = tokenizers.load(folder)
    rows = [
        [tokenizer.special.cls, *tokenizer.encode(text), tokenizer.special.sep]
        for text in TEXTS
    ]
    length = max(map(len, rows))
    ids = [row + [tokenizer.special.pad] * (length - len(row)) for row in rows]
    mask = [[i < len(row) for i in range(length)] for row in rows]
    monkeypatch.setattr(oracle, "INPUT_IDS", np.asarray(ids, np.int32))
    monkeypatch.setattr(oracle, "ATTENTION_MASK", np.asarray(mask))
    monkeypatch.setattr(oracle, "TOKEN_TYPE_IDS", np.zeros((3, length), np.int32))
    model = pretrained.load(folder)
    theirs = transformers.BertModel.from_pretrained(
        folder, add_pooling_layer="pooler" in model.params
    )
    assert oracle.difference(oracle.ours(model), oracle.theirs(theirs)) < TOLERANCE

    library = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = library(list(TEXTS), add_special_tokens=False)["input_ids"]
    assert tokenizer.encode_batch(TEXTS) == wanted
