"""Shapes of pretrained models, with which a plan needs none of their files."""

import pathlib
from typing import Any

from nebula_jax import errors
from nebula_jax.models import transformer
from nebula_jax.models.pretrained import config_json
from nebula_jax.models.pretrained import folder as checkpoint_folder


def _bert(
    vocab_size: int, layers: int, width: int, token_types: int, max_length: int = 512
) -> transformer.Config:
    return transformer.Config(
        vocab_size=vocab_size,
        layers=layers,
        width=width,
        heads=12,
        feed_forward=4 * width,
        max_length=max_length,
        token_types=token_types,
    )


# As their config.json have them; the last three as prepare_pretrained makes them.
KNOWN = {
    "ernie-m-base": _bert(250_002, 12, 768, 0),
    "bert-base-uncased": _bert(30_522, 12, 768, 2),
    "bert-base-multilingual-cased": _bert(119_547, 12, 768, 2),
    "e5-small": _bert(250_037, 12, 384, 2),
    "e5-small-enpt": _bert(47_284, 12, 384, 2),
    "minilm-l6": _bert(30_522, 6, 384, 2),
}


def of(flag: str, name: str, **fields: Any) -> transformer.Config:
    """Returns the shape of a model.

    Args:
      flag: that names it, for errors.
      name: a checkpoint folder, whose config.json is read if it is there; its last part
        may be a key of KNOWN.
      fields: of the Config, to be changed.

    Raises:
      errors.SettingsError: if it is neither, or has not as many positions.
    """
    path = pathlib.Path(name)
    if (path / checkpoint_folder.CONFIG).is_file():
        about = checkpoint_folder.read_config(path)
        _, config = config_json.read(about, path / checkpoint_folder.CONFIG)
    elif path.name in KNOWN:
        config = KNOWN[path.name]
    else:
        raise errors.SettingsError(
            f"--{flag}={name}: no such folder, and its shape is not in the planner's"
            f" table, which has {', '.join(KNOWN)}"
        )
    most = config.max_length
    if (length := fields.get("max_length", 0)) > most:
        raise errors.SettingsError(
            f"--max_length={length}: --{flag}={name} has {most} positions"
        )
    return config.__class__(**vars(config) | fields)


def check_layers(side: str, number: int, config: transformer.Config) -> None:
    """Raises errors.SettingsError if a model has fewer layers than are wanted.

    Args:
      side: that has it, as in a flag.
      number: of layers.
      config: of the whole model.
    """
    if number > config.layers:
        raise errors.SettingsError(
            f"--{side}_layers={number}: its pretrained model has {config.layers}"
        )
