"""config.json of foreign encoders <-> our `transformer.Config`."""

import pathlib
from typing import Any

from nebula_jax.models import modern, transformer
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import names

FIXED: dict[str, Any] = {
    "position_embedding_type": "absolute",
    # Other functions of the same tensors: causal attention, layers that are gone,
    # weights in another code, a model in Python files of its own.
    **dict.fromkeys(("is_decoder", "add_cross_attention", "is_encoder_decoder"), False),
    **{key: {} for key in ("pruned_heads", "quantization_config", "auto_map")},
}
"""Keys that change what a model computes -> the one value that our encoder has."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""ModernBERT's two kinds of layers, as transformers 5 names them."""
FIXED_MODERN: dict[str, Any] = {
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias"), False),
    **{"classifier_bias": False, "decoder_bias": True, "classifier_activation": "gelu"},
    "rope_scaling": {},
    "global_rope_theta": modern.GLOBAL_THETA,
    "local_rope_theta": modern.LOCAL_THETA,
    "rope_parameters": {  # transformers 5, in place of the two above
        FULL: {"rope_theta": modern.GLOBAL_THETA, "rope_type": "default"},
        SLIDING: {"rope_theta": modern.LOCAL_THETA, "rope_type": "default"},
    },
}
"""The same of ModernBERT's own keys, which its MLM head has too."""
LIMITS = {"num_hidden_layers": 1000}
LARGEST = 10_000_000
"""The largest numbers in a config.json that is no mistake: names are made of them
before the tensors are looked at."""


def read(
    metadata: dict[str, Any], path: pathlib.Path
) -> tuple[str, transformer.Config]:
    """Reads family and shape of a model; PretrainedError if ours is no such encoder."""
    name = _family(metadata, path)
    family = names.FAMILIES[name]
    _check_fixed(metadata, path, name)
    width = _number(metadata, path, "hidden_size")
    embedding_width = width
    if name == "electra":
        embedding_width = _number(metadata, path, "embedding_size", width)
    token_types = 0
    if family.token_types:
        token_types = _number(metadata, path, "type_vocab_size", 2)
    positions = _number(metadata, path, "max_position_embeddings")
    config = transformer.Config(
        vocab_size=_number(metadata, path, "vocab_size"),
        layers=_number(metadata, path, "num_hidden_layers"),
        width=width,
        heads=_number(metadata, path, "num_attention_heads"),
        # Paddle's ERNIE-M does not write it, and has four times the width.
        feed_forward=_number(metadata, path, "intermediate_size", 4 * width),
        max_length=positions - family.position_offset,
        token_types=token_types,
        layer_norm_epsilon=_epsilon(metadata, path, family),
        position_offset=family.position_offset,
        embedding_width=None if embedding_width == width else embedding_width,
        body=_body(metadata, path) if name == "modernbert" else None,
    )
    parts = config.heads if config.body is None else 2 * config.heads
    if config.width % parts or config.max_length < 1:
        raise checkpoint_folder.PretrainedError(
            f"{path}: width {config.width} with {config.heads} heads and"
            f" {config.max_length} positions is no encoder"
        )
    return name, config


def _body(metadata: dict[str, Any], path: pathlib.Path) -> modern.Body:
    """Reads the numbers of ModernBERT's layers."""
    usual = modern.Body()
    window = _number(metadata, path, "local_attention", usual.window)
    # transformers 5 writes the kind of each layer, and ignores the number beside it.
    kinds = metadata.get("layer_types")
    if kinds is None:
        key = "global_attn_every_n_layers"
        return modern.Body(_number(metadata, path, key, usual.global_every), window)
    layers = _number(metadata, path, "num_hidden_layers")
    for every in range(1, layers + 1):
        if kinds == [SLIDING if n % every else FULL for n in range(layers)]:
            return modern.Body(every, window)
    raise checkpoint_folder.PretrainedError(
        f"{path}: layer_types is {repr(kinds)[:60]}; our encoder has {FULL} in the"
        f" first of {layers} layers and in every so many after it, else {SLIDING}"
    )


def _family(metadata: dict[str, Any], path: pathlib.Path) -> str:
    """Finds a key of `names.FAMILIES`, by model_type or the architecture's name."""
    kind = metadata.get("model_type")
    if kind is None:  # files of before 2020, and some of Paddle's
        given = metadata.get("architectures")
        first = str(given[0]) if isinstance(given, list) and given else ""
        for family in names.FAMILIES.values():
            if first.startswith(family.architectures[""].removesuffix("Model")):
                kind = family.model_type
                break
    if not isinstance(kind, str) or kind not in names.MODEL_TYPES:
        raise checkpoint_folder.PretrainedError(
            f"{path}: model_type {kind!r}; known are {', '.join(names.MODEL_TYPES)}"
        )
    return names.MODEL_TYPES[kind]


def _check_fixed(metadata: dict[str, Any], path: pathlib.Path, name: str) -> None:
    """Raises PretrainedError where a value is not the one that our encoder has."""
    fixed = FIXED | {names.FAMILIES[name].activation_key: "gelu"}
    if name == "modernbert":
        fixed |= FIXED_MODERN
    if name == "xlm_roberta":
        # Its positions begin after the pad id.
        fixed["pad_token_id"] = names.FAMILIES[name].position_offset - 1
    for key, wanted in fixed.items():
        found = metadata.get(key, wanted)
        # null is transformers' default, but for a theta, which it means to be another.
        is_default = found is None and not key.endswith("_theta")
        if found != wanted and not is_default:
            has = "none of it" if not wanted else f"{wanted} only"
            raise checkpoint_folder.PretrainedError(
                f"{path}: {key} is {repr(found)[:60]}; our encoder has {has}"
            )


def _number(
    metadata: dict[str, Any], path: pathlib.Path, key: str, default: int | None = None
) -> int:
    value, most = metadata.get(key, default), LIMITS.get(key, LARGEST)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise checkpoint_folder.PretrainedError(
            f"{path}: {key} is {repr(value)[:40]}, not a number from 1 to {most:,}"
        )
    return value


def _epsilon(
    metadata: dict[str, Any], path: pathlib.Path, family: names.Family
) -> float:
    epsilon = metadata.get(family.epsilon_key, family.epsilon)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise checkpoint_folder.PretrainedError(
            f"{path}: {family.epsilon_key} is {epsilon!r}"
        )
    return epsilon


def write(
    metadata: dict[str, Any], name: str, config: transformer.Config, head: str
) -> dict[str, Any]:
    """Makes the config.json of a model of `head`, "" if none, from one that was read.

    Keys that have no meaning here stay. Raises PretrainedError if transformers would
    count its positions otherwise.
    """
    family = names.FAMILIES[name]
    metadata = metadata | {
        "architectures": [family.architectures[head]],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward,
        "max_position_embeddings": config.max_length + config.position_offset,
        family.epsilon_key: config.layer_norm_epsilon,
        family.activation_key: "gelu",
    }
    if config.body is not None:
        metadata |= {
            "global_attn_every_n_layers": config.body.global_every,
            "local_attention": config.body.window,
            "global_rope_theta": modern.GLOBAL_THETA,
            "local_rope_theta": modern.LOCAL_THETA,
        }
        # Of transformers 5, which makes them of these numbers: layers may be fewer now.
        for name in ("layer_types", "rope_parameters"):
            metadata.pop(name, None)
        # transformers' own is a row that a smaller vocabulary does not have.
        metadata.setdefault("pad_token_id", 0)
    if family.token_types:
        metadata["type_vocab_size"] = max(config.token_types, 1)
    if name == "electra":
        metadata["embedding_size"] = config.embedding_width or config.width
    # transformers counts XLM-R's positions from the pad id.
    pad = config.position_offset - 1
    if name == "xlm_roberta" and metadata.setdefault("pad_token_id", pad) != pad:
        raise checkpoint_folder.PretrainedError(
            f"XLM-R's pad id is {pad}; this model's is {metadata['pad_token_id']}"
        )
    return metadata
