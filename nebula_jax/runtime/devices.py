"""The devices of a cluster: as many as wanted, with batches spread evenly over them."""

import jax
from jax.sharding import Mesh

from nebula_jax import errors
from nebula_jax.parallel import mesh as mesh_lib


def check(
    batch_size: int, devices_per_cluster: int, model_parallel: int, parts: int = 1
) -> None:
    """Checks, before JAX is used, that a batch can be spread over the devices.

    Args:
      batch_size: examples of a step.
      devices_per_cluster: 0 for all there are, which `mesh` checks.
      model_parallel: devices that share one copy of a model.
      parts: micro-batches of a batch.

    Raises:
      errors.SettingsError: if something does not divide.
    """
    if batch_size % parts:
        raise errors.SettingsError(
            f"--micro_batches={parts} does not divide --batch_size={batch_size}"
        )
    if devices_per_cluster % model_parallel:
        raise errors.SettingsError(
            f"--model_parallel={model_parallel} does not divide"
            f" --devices_per_cluster={devices_per_cluster}"
        )
    if devices_per_cluster:
        _check_rows(batch_size, devices_per_cluster // model_parallel, parts)


def simulate(devices_per_cluster: int) -> None:
    """Makes so many CPU devices, if not 0; to be called before JAX is used."""
    if devices_per_cluster:
        jax.config.update("jax_num_cpu_devices", devices_per_cluster)


def mesh(
    batch_size: int, devices_per_cluster: int, model_parallel: int, parts: int = 1
) -> Mesh:
    """Returns a cluster's devices as a mesh; for the arguments see `check`.

    Raises:
      errors.SettingsError: if there are fewer, or a batch cannot be spread over them.
    """
    devices = jax.devices()
    if devices_per_cluster > len(devices):
        raise errors.SettingsError(
            f"--devices_per_cluster={devices_per_cluster}: this machine has"
            f" {len(devices)}"
        )
    devices = devices[: devices_per_cluster or None]
    found = mesh_lib.make_mesh(devices, model_parallel)
    _check_rows(batch_size, found.shape["data"], parts)
    return found


def _check_rows(batch_size: int, replicas: int, parts: int) -> None:
    if batch_size // parts % replicas:
        what = f"--batch_size={batch_size}"
        if parts > 1:
            what = f"a micro-batch of {batch_size // parts} ({what}"
            what += f", --micro_batches={parts})"
        raise errors.SettingsError(f"{what} does not divide over {replicas} devices")
