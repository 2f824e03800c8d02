"""A checkpoint's tensors as the tree of our parameters."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from nebula_jax.models import masked_lm, transformer
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import names as state_names


@functools.cache  # to trace the modules takes most of the time of a small checkpoint
def shapes(config: transformer.Config) -> Mapping[str, tuple[int, ...]]:
    """Maps the path of every parameter that a config's model can have to its shape."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1, 1, config.width), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    table = jax.ShapeDtypeStruct(
        (config.vocab_size, config.embedding_width or config.width), jnp.float32
    )
    # All after the first are alike: trace two.
    two_layers = dataclasses.replace(config, layers=min(config.layers, 2))

    def init(module: nn.Module, *arguments: Any, **fixed: bool) -> dict[str, Any]:
        make = functools.partial(module.init, jax.random.key(0), **fixed)
        return jax.eval_shape(make, *arguments)["params"]

    encoder = init(transformer.Encoder(two_layers), hidden, mask, deterministic=True)
    for number in range(2, config.layers):
        encoder[f"layer_{number}"] = encoder["layer_1"]
    square = jax.ShapeDtypeStruct((config.width,) * 2, jnp.float32)
    row = jax.ShapeDtypeStruct((config.width,), jnp.float32)
    tree = {
        "embeddings": init(transformer.Embeddings(config), ids, deterministic=True),
        "encoder": encoder,
        "pooler": {"dense": {"kernel": square, "bias": row}},
        "mlm_head": init(masked_lm.MLMHead(config), hidden, table),
        "rtd_head": init(masked_lm.RTDHead(config), hidden),
    }
    return {
        path: leaf.shape
        for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


def part_of(path: str) -> str:
    """Returns the first name of a path: `encoder/layer_0/...` -> `encoder`."""
    return path.partition("/")[0]


def read(
    tensors: dict[str, np.ndarray],
    name: str,
    config: transformer.Config,
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Renames and reshapes a checkpoint's tensors as our parameters."""
    family = state_names.FAMILIES[name]
    given = state_names.parted(
        {state_names.normal(key): array for key, array in tensors.items()}
    )
    wanted = {}  # path -> (foreign name, our shape)
    for path, shape in shapes(config).items():
        foreign_name = state_names.foreign(path, family.rules)
        if foreign_name is not None:
            wanted[path] = (foreign_name, shape)
    parts = {"embeddings", "encoder"} | {
        part_of(path)
        for path, (foreign_name, _) in wanted.items()
        if foreign_name in given
    }
    wanted = {path: each for path, each in wanted.items() if part_of(path) in parts}

    problems = _problems(given, wanted, family.transposed)
    table = wanted["embeddings/word_embeddings/embedding"][0]
    wrapped = [name for name in given if name.endswith(f".{table}")]
    if table not in given and wrapped:
        raise checkpoint_folder.PretrainedError(
            f"{folder}: all names begin with {wrapped[0].removesuffix(table)!r}, which"
            " a wrapper has put before them; save the model inside"
        )
    if problems:
        raise checkpoint_folder.PretrainedError(
            f"{folder} is no {name} checkpoint: {'; '.join(problems)}"
        )
    _check_tied(given, table, folder)
    return traverse_util.unflatten_dict(
        {
            path: state_names.to_ours(
                path, given[foreign_name], shape, family.transposed
            )
            for path, (foreign_name, shape) in wanted.items()
        },
        sep="/",
    )


def _problems(
    given: dict[str, np.ndarray],
    wanted: dict[str, tuple[str, tuple[int, ...]]],
    transposed: bool,
) -> list[str]:
    """Returns what is wrong with a checkpoint's tensors, in words."""
    missing, misshapen, quantized = [], [], []
    for path, (foreign_name, shape) in wanted.items():
        if foreign_name not in given:
            missing.append(foreign_name)
            continue
        expected = state_names.foreign_shape(path, shape, transposed)
        if given[foreign_name].shape != expected:
            misshapen.append(
                f"{foreign_name} is {list(given[foreign_name].shape)},"
                f" expected {list(expected)}"
            )
        elif not jnp.issubdtype(given[foreign_name].dtype, jnp.floating):
            quantized.append(f"{foreign_name} is {given[foreign_name].dtype}")
    unexpected = [
        key
        for key in sorted(
            given.keys() - {foreign_name for foreign_name, _ in wanted.values()}
        )
        if not state_names.IGNORED.fullmatch(key)
    ]
    return [
        f"{problem}: {checkpoint_folder.first_few(names)}"
        for problem, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("not of the shape in config.json", misshapen),
            ("no floating-point numbers", quantized),
        )
        if names
    ]


def _check_tied(given: dict[str, np.ndarray], table: str, folder: pathlib.Path) -> None:
    for key, array in given.items():
        if state_names.TIED.fullmatch(key) and not np.array_equal(array, given[table]):
            raise checkpoint_folder.PretrainedError(
                f"{folder}: {key} is not the embedding table; our heads are tied to it"
            )
