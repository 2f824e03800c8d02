"""The processes of one cluster, and what goes from one of them to the others.

A cluster may run on many hosts (`jax.distributed`): every process, a *rank*, runs the
same program on its shards. Rank 0, the root, alone has the bridge, the checkpoints and
the records. What the others need of it the cluster's own collectives carry, as bytes,
so that no value changes. P processes, N bytes or values.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROOT = 0
_SMALLEST = 64  # bytes, so that messages have few lengths, and programs are few


def count() -> int:
    """Returns P."""
    return jax.process_count()


def rank() -> int:
    """Returns the number of this process, from 0."""
    return jax.process_index()


def is_root() -> bool:
    """Returns True in the process that has the bridge."""
    return rank() == ROOT


@functools.cache
def _mesh() -> Mesh:
    """Returns all devices, [P, devices of a process]."""
    devices = sorted(jax.devices(), key=lambda each: (each.process_index, each.id))
    return Mesh(np.asarray(devices).reshape(count(), -1), ("rank", "device"))


@functools.cache
def _everywhere() -> NamedSharding:
    return NamedSharding(_mesh(), PartitionSpec())


def _rows(buffer: np.ndarray) -> jax.Array:
    """Makes [P, N] uint8 of this process's row, [N] uint8."""
    where = NamedSharding(_mesh(), PartitionSpec("rank"))
    shape = (count(), len(buffer))
    return jax.make_array_from_process_local_data(where, buffer[None], shape)


def exchange(values: Sequence[int]) -> np.ndarray:
    """Returns the values of every process, [P, N] int64, in all of them: N of each."""
    own = np.asarray(values, np.int64)
    if count() == 1:
        return own[None]
    rows = jax.device_get(everywhere(_rows(own.view(np.uint8))))
    return np.ascontiguousarray(rows).view(np.int64)


def agree(value: int) -> int:
    """Returns the root's value in every process."""
    return int(exchange([value])[ROOT, 0])


def bytes_from_root(data: bytes) -> bytes:
    """Returns the root's bytes in every process; those given elsewhere do not count."""
    if count() == 1:
        return data
    size = agree(len(data))
    capacity = max(_SMALLEST, 2 ** math.ceil(math.log2(max(1, size))))
    padded = np.zeros(capacity, np.uint8)
    if is_root():
        padded[:size] = np.frombuffer(data, np.uint8)
    spec = jax.ShapeDtypeStruct((capacity,), jnp.uint8)
    return jax.device_get(from_root(padded, spec))[:size].tobytes()


def from_root(arrays: Any, like: Any) -> Any:
    """Puts the root's arrays on the devices of all processes.

    `arrays` on the host are used in the root alone; `like` is their tree of shapes and
    dtypes, in every process. Returns the root's arrays, in a cluster of one process as
    they are, else a copy on every device.
    """
    if count() == 1:
        return arrays
    specs, structure = jax.tree.flatten(like)
    sizes = [spec.size * spec.dtype.itemsize for spec in specs]
    if is_root():
        parts = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(arrays)]
        flat = [part.reshape(-1).view(np.uint8) for part in parts]
        buffer = np.concatenate([np.zeros(0, np.uint8), *flat])
    else:
        buffer = np.zeros(sum(sizes), np.uint8)
    shapes = tuple((spec.shape, np.dtype(spec.dtype)) for spec in specs)
    return jax.tree.unflatten(structure, _scatter(shapes)(_rows(buffer)))


@functools.lru_cache(maxsize=256)
def _scatter(shapes: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> Any:
    """Compiles [P, N] uint8, all rows but the root's 0 -> the root's arrays."""

    def arrays(rows: jax.Array) -> list[jax.Array]:
        row, found, begin = jnp.sum(rows, axis=0, dtype=jnp.uint8), [], 0
        for shape, dtype in shapes:
            size = math.prod(shape)
            part = row[begin : begin + size * dtype.itemsize]
            begin += size * dtype.itemsize
            found.append(_of_bytes(part, shape, dtype))
        return found

    return jax.jit(arrays, out_shardings=_everywhere())


def _of_bytes(part: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    if dtype == np.bool_:
        return (part != 0).reshape(shape)
    if dtype.itemsize > 1:
        part = part.reshape(-1, dtype.itemsize)
    return jax.lax.bitcast_convert_type(part, dtype).reshape(shape)


def everywhere(arrays: Any) -> Any:
    """Copies sharded arrays to every device, where each process can read them whole."""
    if count() == 1:
        return arrays

    def whole(leaf: Any) -> Any:
        is_local = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        return leaf if is_local else _copy()(leaf)

    return jax.tree.map(whole, arrays)


@functools.cache
def _copy() -> Any:
    return jax.jit(lambda tree: tree, out_shardings=_everywhere())


def to_root(arrays: Any) -> Any:
    """Brings sharded arrays to the root's host, as NumPy's; returns None elsewhere."""
    leaves, structure = jax.tree.flatten(arrays)
    hosts = []
    for leaf in leaves:
        whole = everywhere(leaf)
        hosts.append(jax.device_get(whole) if is_root() else None)
    return jax.tree.unflatten(structure, hosts) if is_root() else None


def in_step(steps: Iterator[int]) -> Iterator[int]:
    """Yields the root's steps, numbers above 0, in every process."""
    if count() == 1:
        yield from steps
        return
    while step := agree(next(steps, 0) if is_root() else 0):
        yield step
