"""config.json of foreign encoders <-> our `transformer.Config`."""

import pathlib
from typing import Any

from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import names
from nebula_jax.models import transformer


def read(about: dict[str, Any], path: pathlib.Path) -> tuple[str, transformer.Config]:
    """Family and shape of a foreign model.

    Args:
      about: what its config.json says.
      path: of that file, for errors.

    Returns:
      A key of `state_names.FAMILIES`, and a Config without dropout, in float32.

    Raises:
      PretrainedError: for another architecture than our encoder's.
    """
    kind = about.get("model_type")
    if kind is None:  # files of before 2020, and some of Paddle's
        architectures = about.get("architectures")
        is_list = isinstance(architectures, list) and architectures
        architecture = str(architectures[0]) if is_list else ""
        kind = next(
            (
                family.model_type
                for family in names.FAMILIES.values()
                if architecture.startswith(family.architectures[""][: -len("Model")])
            ),
            None,
        )
    if not isinstance(kind, str) or kind not in names.MODEL_TYPES:
        raise checkpoint_folder.PretrainedError(
            f"{path}: model_type {kind!r}; known are"
            f" {', '.join(names.MODEL_TYPES)}"
        )
    name = names.MODEL_TYPES[kind]
    family = names.FAMILIES[name]

    def number(key: str, default: int | None = None) -> int:
        value = about.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise checkpoint_folder.PretrainedError(
                f"{path}: {key} is {value!r}, not a positive number"
            )
        return value

    fixed = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
    if name == "xlm_roberta":
        # Its positions begin after the pad id.
        fixed["pad_token_id"] = family.position_offset - 1
    for key, wanted in fixed.items():
        if about.get(key, wanted) != wanted:
            raise checkpoint_folder.PretrainedError(
                f"{path}: {key} is {about[key]!r}; our encoder has {wanted} only"
            )
    width = number("hidden_size")
    embedding_width = number("embedding_size", width) if name == "electra" else width
    epsilon = about.get("layer_norm_eps", family.epsilon)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise checkpoint_folder.PretrainedError(
            f"{path}: layer_norm_eps is {epsilon!r}"
        )
    config = transformer.Config(
        vocab_size=number("vocab_size"),
        layers=number("num_hidden_layers"),
        width=width,
        heads=number("num_attention_heads"),
        # Paddle's ERNIE-M does not write it, and has four times the width.
        feed_forward=number("intermediate_size", 4 * width),
        max_length=number("max_position_embeddings") - family.position_offset,
        token_types=number("type_vocab_size", 2) if family.token_types else 0,
        layer_norm_epsilon=epsilon,
        position_offset=family.position_offset,
        embedding_width=None if embedding_width == width else embedding_width,
    )
    if config.width % config.heads or config.max_length < 1:
        raise checkpoint_folder.PretrainedError(
            f"{path}: width {config.width} with {config.heads} heads and"
            f" {config.max_length} positions is no encoder"
        )
    return name, config


def write(
    about: dict[str, Any], name: str, config: transformer.Config, head: str
) -> dict[str, Any]:
    """config.json of a model.

    Args:
      about: what it said when it was read; what we do not know stays.
      name: its family.
      config: its shape.
      head: the head by which transformers' class is chosen; "" if it has none.

    Returns:
      JSON values.

    Raises:
      PretrainedError: if transformers would count its positions otherwise.
    """
    family = names.FAMILIES[name]
    about = about | {
        "architectures": [family.architectures[head]],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward,
        "max_position_embeddings": config.max_length + config.position_offset,
        "layer_norm_eps": config.layer_norm_epsilon,
        "hidden_act": "gelu",
    }
    if family.token_types:
        about["type_vocab_size"] = max(config.token_types, 1)
    if name == "electra":
        about["embedding_size"] = config.embedding_width or config.width
    # transformers counts XLM-R's positions from the pad id.
    pad = config.position_offset - 1
    if name == "xlm_roberta" and about.setdefault("pad_token_id", pad) != pad:
        raise checkpoint_folder.PretrainedError(
            f"XLM-R's pad id is {pad}; this model's is {about['pad_token_id']}"
        )
    return about
