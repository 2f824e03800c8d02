"""Names of our parameters in foreign checkpoints: one table of rules a family.

A rule is (regex of a path in our tree, the module's name there). The leaf follows by
LEAVES. Both directions use the same table: our paths are known from the config, so a
checkpoint's names are computed and compared, and none is ever guessed.

D width, H heads, K head width, F feed-forward, V vocabulary, E embedding width.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}

Rules = Sequence[tuple[str, str]]

_EMBEDDINGS = (
    (r"embeddings/(\w+_embeddings)", r"embeddings.\1"),
    (r"embeddings/layer_norm", "embeddings.LayerNorm"),
)
_OURS, _THEIRS = r"encoder/layer_(\d+)", r"encoder.layer.\1"
_LAYERS = (
    (rf"{_OURS}/attention/output", rf"{_THEIRS}.attention.output.dense"),
    (rf"{_OURS}/attention/(\w+)", rf"{_THEIRS}.attention.self.\2"),
    (rf"{_OURS}/attention_layer_norm", rf"{_THEIRS}.attention.output.LayerNorm"),
    (rf"{_OURS}/output_layer_norm", rf"{_THEIRS}.output.LayerNorm"),
    (rf"{_OURS}/(intermediate|output)", rf"{_THEIRS}.\2.dense"),
)

BERT = (
    *_EMBEDDINGS,
    *_LAYERS,
    (r"pooler/dense", "pooler.dense"),
    (r"classifier_head/dense", "bert.pooler.dense"),
    (r"classifier_head/output", "classifier"),
    (r"mlm_head/dense", "cls.predictions.transform.dense"),
    (r"mlm_head/layer_norm", "cls.predictions.transform.LayerNorm"),
    (r"mlm_head", "cls.predictions"),
)
XLM_ROBERTA = (
    *_EMBEDDINGS,
    *_LAYERS,
    (r"pooler/dense", "pooler.dense"),
    (r"classifier_head/dense", "classifier.dense"),
    (r"classifier_head/output", "classifier.out_proj"),
    (r"mlm_head/(dense|layer_norm)", r"lm_head.\1"),
    (r"mlm_head", "lm_head"),
)
ELECTRA = (
    (r"embeddings/projection", "embeddings_project"),
    *_EMBEDDINGS,
    *_LAYERS,
    (r"rtd_head/dense", "discriminator_predictions.dense"),
    (r"rtd_head/output", "discriminator_predictions.dense_prediction"),
    (r"mlm_head/dense", "generator_predictions.dense"),
    (r"mlm_head/layer_norm", "generator_predictions.LayerNorm"),
    (r"mlm_head", "generator_lm_head"),
)
_ERNIE_M = (
    (r"embeddings/((word|position)_embeddings|layer_norm)", r"embeddings.\1"),
    (r"encoder/layer_(\d+)/attention_layer_norm", r"encoder.layers.\1.norm1"),
    (r"encoder/layer_(\d+)/output_layer_norm", r"encoder.layers.\1.norm2"),
    (r"encoder/layer_(\d+)/intermediate", r"encoder.layers.\1.linear1"),
    (r"encoder/layer_(\d+)/output", r"encoder.layers.\1.linear2"),
    (r"encoder/layer_(\d+)/attention/output", r"encoder.layers.\1.self_attn.out_proj"),
    (r"pooler/dense", "pooler.dense"),
    (r"classifier_head/dense", "ernie_m.pooler.dense"),
    (r"classifier_head/output", "classifier"),
)


def _with_attention(prefix: str) -> Rules:
    """Returns ERNIE-M's rules, given what precedes q_proj, k_proj and v_proj."""
    template = rf"encoder.layers.\1.{prefix}."
    return *_ERNIE_M, *(
        (rf"encoder/layer_(\d+)/attention/{name}", f"{template}{name[0]}_proj")
        for name in ("query", "key", "value")
    )


ERNIE_M = _with_attention("self_attn.self_attn")  # as in transformers: wrapped again
ERNIE_M_PADDLE = _with_attention("self_attn")  # as published by Paddle

MODERNBERT = (
    (r"embeddings/word_embeddings", "embeddings.tok_embeddings"),
    (r"embeddings/layer_norm", "embeddings.norm"),
    (r"encoder/layer_(\d+)/attention_layer_norm", r"layers.\1.attn_norm"),
    (r"encoder/layer_(\d+)/attention/output", r"layers.\1.attn.Wo"),
    (r"encoder/layer_(\d+)/attention/(\w+)", r"layers.\1.attn.Wqkv.\2"),
    (r"encoder/layer_(\d+)/feed_forward_layer_norm", r"layers.\1.mlp_norm"),
    (r"encoder/layer_(\d+)/(intermediate|gate)", r"layers.\1.mlp.Wi.\2"),
    (r"encoder/layer_(\d+)/output", r"layers.\1.mlp.Wo"),
    (r"encoder/final_layer_norm", "final_norm"),
    (r"mlm_head/dense", "head.dense"),
    (r"mlm_head/layer_norm", "head.norm"),
    (r"mlm_head", "decoder"),
)
FUSED = {"Wqkv": ("query", "key", "value"), "Wi": ("intermediate", "gate")}
"""Matrices in whose rows ModernBERT has several of ours, one after the other."""
_PART = re.compile(rf"(.*\.({'|'.join(FUSED)}))\.(\w+)\.(\w+)")


class Family(NamedTuple):
    """One kind of checkpoint, and how it writes its tensors."""

    rules: Rules
    model_type: str  # its value in config.json
    prefix: str  # before embeddings, encoder and pooler, if the file has heads too
    architectures: dict[str, str]  # transformers' classes by their head; "" with none
    position_offset: int = 0  # rows of the position table before the first position
    token_types: bool = True  # True if it has embeddings of token types
    epsilon: float = 1e-12  # of the layer norms, if config.json has none
    transposed: bool = True  # PyTorch's [out, in]; else [in, out], as Paddle's and ours
    epsilon_key: str = "layer_norm_eps"  # of the layer norms' epsilon in config.json
    activation_key: str = "hidden_act"  # of the feed-forward part's activation there


FAMILIES = {
    "bert": Family(
        BERT,
        "bert",
        "bert.",
        {
            "": "BertModel",
            "mlm_head": "BertForMaskedLM",
            "classifier_head": "BertForSequenceClassification",
        },
    ),
    "xlm_roberta": Family(
        XLM_ROBERTA,
        "xlm-roberta",
        "roberta.",
        {
            "": "XLMRobertaModel",
            "mlm_head": "XLMRobertaForMaskedLM",
            "classifier_head": "XLMRobertaForSequenceClassification",
        },
        position_offset=2,  # its pad id plus one
    ),
    "electra": Family(
        ELECTRA,
        "electra",
        "electra.",
        {
            "": "ElectraModel",
            "rtd_head": "ElectraForPreTraining",
            "mlm_head": "ElectraForMaskedLM",
        },
    ),
    "ernie_m": Family(
        ERNIE_M,
        "ernie_m",
        "ernie_m.",
        {"": "ErnieMModel", "classifier_head": "ErnieMForSequenceClassification"},
        position_offset=2,
        token_types=False,
        epsilon=1e-5,
    ),
    "ernie_m_paddle": Family(
        ERNIE_M_PADDLE,
        "ernie_m",
        "ernie_m.",
        {"": "ErnieMModel"},
        position_offset=2,
        token_types=False,
        epsilon=1e-5,
        transposed=False,
    ),
    "modernbert": Family(
        MODERNBERT,
        "modernbert",
        "model.",
        {"": "ModernBertModel", "mlm_head": "ModernBertForMaskedLM"},
        token_types=False,
        epsilon=1e-5,
        epsilon_key="norm_eps",
        activation_key="hidden_activation",
    ),
}

MODEL_TYPES = {
    "bert": "bert",
    "xlm-roberta": "xlm_roberta",
    "roberta": "xlm_roberta",
    "electra": "electra",
    "ernie_m": "ernie_m",
    "modernbert": "modernbert",
}

PREFIX = re.compile(r"^(bert|roberta|electra|ernie_m|model)\.")

# Neither used nor missed: index buffers, next-sentence prediction, and the second copy
# that a tied output layer has in some files.
IGNORED = re.compile(
    r"(.*\.)?embeddings\.(position_ids|token_type_ids)|cls\.seq_relationship\..*"
    r"|(cls\.predictions|lm_head)\.decoder\.(weight|bias)"
    r"|(generator_lm_head|decoder)\.weight"
)
# What a fine-tuned model has above its encoder.
HEADS = re.compile(r"(classifier|qa_outputs|score|sequence_summary|pre_classifier)\..*")
TIED = re.compile(r"((cls\.predictions\.|lm_head\.)?decoder|generator_lm_head)\.weight")

OLD_LEAVES = {"gamma": "weight", "beta": "bias"}  # of layer norms converted from TF


def normal(name: str) -> str:
    """Converts a checkpoint's name: no prefix, and the leaf as PyTorch names it."""
    stem, _, leaf = PREFIX.sub("", name).rpartition(".")
    return f"{stem}.{OLD_LEAVES.get(leaf, leaf)}"


def parted(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parts the matrices of FUSED: `Wi.weight` -> `Wi.intermediate.weight` and gate."""
    found = {}
    for name, array in tensors.items():
        module, _, leaf = name.rpartition(".")
        parts = FUSED.get(module.rpartition(".")[2], ())
        if parts and array.ndim and len(array) % len(parts) == 0:
            for part, rows in zip(parts, np.split(array, len(parts)), strict=True):
                found[f"{module}.{part}.{leaf}"] = rows
        else:
            found[name] = array
    return found


def fused(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Joins what `parted` parts."""
    found: dict[str, np.ndarray] = {}
    for name in tensors:
        match = _PART.fullmatch(name)
        if match is None:
            found[name] = tensors[name]
            continue
        module, kind, _, leaf = match.groups()
        if f"{module}.{leaf}" not in found:
            rows = [tensors[f"{module}.{part}.{leaf}"] for part in FUSED[kind]]
            found[f"{module}.{leaf}"] = np.concatenate(rows)
    return found


def foreign(path: str, rules: Rules) -> str | None:
    """Converts a path of our tree to a family's name; None without such a parameter.

    >>> foreign("encoder/layer_3/attention/query/kernel", BERT)
    'encoder.layer.3.attention.self.query.weight'
    """
    module, _, leaf = path.rpartition("/")
    for pattern, template in rules:
        match = re.fullmatch(pattern, module)
        if match:
            return f"{match.expand(template)}.{LEAVES[leaf]}"
    return None


def to_foreign(path: str, array: np.ndarray, transposed: bool) -> np.ndarray:
    """Converts ours to a checkpoint's float32: heads folded, perhaps [out, in]."""
    array = np.asarray(array, np.float32)
    if path.startswith("rtd_head/output"):
        array = -array  # ELECTRA's logit is of "replaced", ours of "original" (eq. 8)
    if path.endswith("/kernel"):
        array = array.reshape(_matrix(path, array.shape))
        return array.T if transposed else array
    if "/attention/" in path:
        return array.reshape(-1)
    return array


def to_ours(
    path: str, array: np.ndarray, shape: tuple[int, ...], transposed: bool
) -> np.ndarray:
    """Inverts `to_foreign`: a new float32 array of the shape that ours has."""
    if path.endswith("/kernel") and transposed:
        array = array.T
    array = np.array(array, np.float32, order="C").reshape(shape)
    return -array if path.startswith("rtd_head/output") else array


def foreign_shape(
    path: str, shape: tuple[int, ...], transposed: bool
) -> tuple[int, ...]:
    """Computes the shape in a checkpoint of a parameter of our shape `shape`."""
    if path.endswith("/kernel"):
        matrix = _matrix(path, shape)
        return matrix[::-1] if transposed else matrix
    return (int(np.prod(shape)),) if "/attention/" in path else tuple(shape)


def _matrix(path: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Computes [in, out]; in our tree Q, K, V are [D, H, K], the output [H, K, D]."""
    inner = 2 if path.endswith("attention/output/kernel") else 1
    return int(np.prod(shape[:inner])), int(np.prod(shape[inner:]))
