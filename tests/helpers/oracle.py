"""What transformers says about small models of each family, and what we say.

Weights follow from names, so that a golden file needs shapes and outputs alone.

B batch, L length, D width, V vocabulary.
"""

import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from nebula_jax.models import masked_lm, pretrained, transformer

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 12,
    "max_position_embeddings": 12,
}

# Golden file -> transformers' class, what its config adds to SHAPE, our family.
MODELS = {
    "bert": ("BertForMaskedLM", {"type_vocab_size": 2, "pad_token_id": 0}, "bert"),
    "bert_pooled": ("BertModel", {"type_vocab_size": 2, "pad_token_id": 0}, "bert"),
    "xlm_roberta": (
        "XLMRobertaForMaskedLM",
        {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5},
        "xlm_roberta",
    ),
    "electra_discriminator": (
        "ElectraForPreTraining",
        {"type_vocab_size": 2, "pad_token_id": 0, "embedding_size": 8},
        "electra",
    ),
    "electra_generator": (
        "ElectraForMaskedLM",
        {"type_vocab_size": 2, "pad_token_id": 0, "embedding_size": 4},
        "electra",
    ),
    "ernie_m": ("ErnieMModel", {"pad_token_id": 1, "layer_norm_eps": 1e-5}, "ernie_m"),
    "modernbert": (
        "ModernBertForMaskedLM",
        # Layers of both reaches after the first, and windows shorter than a row.
        {"pad_token_id": 0, "local_attention": 4, "global_attn_every_n_layers": 2}
        | {"num_hidden_layers": 3},
        "modernbert",
    ),
}

INPUT_IDS = np.asarray([[2, 5, 9, 21, 7, 3], [2, 11, 6, 3, 0, 0]], np.int32)
ATTENTION_MASK = np.asarray([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
TOKEN_TYPE_IDS = np.asarray([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]], np.int32)

OUTPUTS = {"hidden", "pooled", "mlm_logits", "rtd_logits"}

GOLDENS = pathlib.Path(__file__).parents[1] / "models" / "pretrained" / "goldens"


def golden(name: str) -> dict:
    """config, tensors (name -> shape) and transformers' outputs."""
    return json.loads((GOLDENS / f"{name}.json").read_text("utf-8"))


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that depend on a tensor's name, large enough to tell models apart."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).randn(*shape) * 0.3
    is_scale = name.lower().endswith(("norm.weight", "norm1.weight", "norm2.weight"))
    return (noise + is_scale).astype(np.float32)


def write(parent: pathlib.Path, name: str = "bert", **changes) -> pathlib.Path:
    """The checkpoint of a golden file; `changes` go into its config."""
    about = golden(name)
    folder = parent / "checkpoint"
    folder.mkdir(parents=True)
    config = json.dumps(about["config"] | changes)
    (folder / "config.json").write_text(config, "utf-8")
    tensors = {name: weights(name, shape) for name, shape in about["tensors"].items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def input_ids(pad: int) -> np.ndarray:
    """[B, L] int32, the second row padded."""
    return np.where(ATTENTION_MASK, INPUT_IDS, pad).astype(np.int32)


def ours(model: pretrained.Pretrained) -> dict[str, np.ndarray]:
    """Our outputs: `hidden`, and those of the pooler and heads that are there."""
    config, params = model.config, model.params
    types = TOKEN_TYPE_IDS if config.token_types > 1 else None
    ids = input_ids(model.metadata.get("pad_token_id") or 0)

    def forward(params):
        embeddings = {"params": params["embeddings"]}
        hidden = transformer.Embeddings(config).apply(embeddings, ids, True, types)
        hidden = transformer.Encoder(config).apply(
            {"params": params["encoder"]}, hidden, ATTENTION_MASK, True
        )
        outputs = {"hidden": hidden}
        if "pooler" in params:
            dense = transformer.dense(config.width, config, "dense")
            pooler = {"params": params["pooler"]["dense"]}
            outputs["pooled"] = jnp.tanh(dense.apply(pooler, hidden[:, 0]))
        if "mlm_head" in params:
            table = params["embeddings"]["word_embeddings"]["embedding"]
            outputs["mlm_logits"] = masked_lm.MLMHead(config).apply(
                {"params": params["mlm_head"]}, hidden, table
            )
        if "rtd_head" in params:
            outputs["rtd_logits"] = masked_lm.RTDHead(config).apply(
                {"params": params["rtd_head"]}, hidden
            )
        return outputs

    return jax.tree.map(np.asarray, jax.jit(forward)(params))


def difference(ours: dict[str, np.ndarray], theirs: dict) -> float:
    """Largest absolute difference where there is no padding."""
    assert ours.keys() == theirs.keys()
    where = {key: ... if key == "pooled" else ATTENTION_MASK for key in ours}
    return max(
        float(np.abs(ours[key] - np.asarray(theirs[key]))[where[key]].max())
        for key in ours
    )


def transformers_class(name: str):
    """A class of transformers 4.57, which keeps ErnieM apart."""
    import transformers
    from transformers.models.deprecated import ernie_m

    return getattr(ernie_m if name.startswith("ErnieM") else transformers, name)


def theirs(model) -> dict[str, np.ndarray]:
    """transformers' outputs by our names; our RTD says "original", not "replaced"."""
    import torch

    has_types = getattr(model.config, "type_vocab_size", 0) > 1
    ids = input_ids(model.config.pad_token_id)
    with torch.no_grad():
        found = model.eval()(
            input_ids=torch.tensor(ids.astype(np.int64)),
            attention_mask=torch.tensor(ATTENTION_MASK.astype(np.int64)),
            output_hidden_states=True,
            **(
                {"token_type_ids": torch.tensor(TOKEN_TYPE_IDS.astype(np.int64))}
                if has_types
                else {}
            ),
        )
        last = getattr(model.base_model, "final_norm", torch.nn.Identity())
        outputs = {"hidden": last(found.hidden_states[-1]).numpy()}
    if getattr(found, "pooler_output", None) is not None:
        outputs["pooled"] = found.pooler_output.numpy()
    if type(model).__name__.endswith("MaskedLM"):
        outputs["mlm_logits"] = found.logits.numpy()
    if type(model).__name__.endswith("PreTraining"):
        outputs["rtd_logits"] = -found.logits.numpy()
    return outputs


def build(name: str, **shape):
    """transformers' model of a golden file or another shape, with our weights."""
    import torch

    class_name, extra, _ = MODELS[name]
    made = transformers_class(class_name)
    config = made.config_class(**SHAPE | extra | shape)
    config.architectures = [class_name]
    model = made(config)
    state = model.state_dict()
    tied = tuple(getattr(model, "_tied_weights_keys", None) or ("-",))
    kept = {
        key: torch.tensor(weights(key, tuple(value.shape)))
        for key, value in state.items()
        if value.is_floating_point() and not key.endswith(tied)
    }
    problems = model.load_state_dict(kept, strict=False)
    assert not problems.unexpected_keys
    model.tie_weights()
    return model, {key: list(value.shape) for key, value in kept.items()}
