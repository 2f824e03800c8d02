"""The devices of a cluster: how many, and how a batch and a model spread over them."""

import dataclasses

import jax
from jax.sharding import Mesh

from nebula_jax import errors
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules


@dataclasses.dataclass(frozen=True)
class Layout:
    """The use that a cluster makes of its devices, named like the flags."""

    devices_per_cluster: int = 0  # 0 for all there are
    fsdp: int = 1  # devices among which parameters are split while they are not used
    model_parallel: int = 1  # devices that share the work on one copy of a model


def check(layout: Layout, batch_size: int, parts: int = 1) -> None:
    """Checks, before JAX is used, that a batch can be spread over the devices.

    A batch has `parts` micro-batches. A layout of all devices there are `mesh` checks.
    Raises errors.SettingsError if something does not divide, with what would.
    """
    if batch_size % parts:
        nearest = rules.nearest_divisor(batch_size, parts)
        raise errors.SettingsError(
            f"micro_batches={parts} does not divide batch_size={batch_size};"
            f" {nearest} does"
        )
    if layout.devices_per_cluster:
        _check_rows(layout, layout.devices_per_cluster, batch_size, parts)


def simulate(layout: Layout, processes: int = 1) -> None:
    """Makes CPU devices, if their number is given; to be called before JAX is used.

    Each of the cluster's processes has as many of them. Raises errors.SettingsError if
    they do not divide.
    """
    devices = layout.devices_per_cluster
    if devices % processes:
        nearest = -(-devices // processes) * processes
        raise errors.SettingsError(
            f"a cluster of {processes} processes cannot share"
            f" devices_per_cluster={devices} evenly; {nearest} would do"
        )
    if devices:
        jax.config.update("jax_num_cpu_devices", devices // processes)


def mesh(layout: Layout, batch_size: int, parts: int = 1) -> Mesh:
    """Returns a cluster's devices as a mesh; for the arguments see `check`.

    Raises errors.SettingsError if there are fewer, or a batch does not spread over
    them.
    """
    devices = jax.devices()
    if layout.devices_per_cluster > len(devices):
        raise errors.SettingsError(
            f"devices_per_cluster={layout.devices_per_cluster}: this machine has"
            f" {len(devices)}"
        )
    if jax.process_count() > 1 and 0 < layout.devices_per_cluster < len(devices):
        raise errors.SettingsError(
            f"devices_per_cluster={layout.devices_per_cluster}: the processes of this"
            f" cluster have {len(devices)}, of which none may be left out"
        )
    devices = devices[: layout.devices_per_cluster or None]
    _check_rows(layout, len(devices), batch_size, parts)
    return mesh_lib.make_mesh(devices, layout.fsdp, layout.model_parallel)


def _check_rows(layout: Layout, devices: int, batch_size: int, parts: int) -> None:
    mesh_lib.check(devices, layout.fsdp, layout.model_parallel)
    rows, groups = batch_size // parts, devices // layout.model_parallel
    if rows % groups:
        what = f"batch_size={batch_size}"
        if parts > 1:
            what = f"a micro-batch of {rows} ({what}, micro_batches={parts})"
        shared = f"{devices} devices"
        if layout.model_parallel > 1:
            shared += f" with model_parallel={layout.model_parallel}"
        above = -(-rows // groups) * groups
        raise errors.SettingsError(
            f"{what} does not divide over {shared}; {above * parts} would"
        )
