import re

import pytest

from nebula_jax import errors
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.ranks.devices import Layout


@pytest.mark.parametrize(
    ("layout", "batch_size", "parts", "words"),
    [
        (Layout(), 6, 4, "micro_batches=4 does not divide batch_size=6; 3 does"),
        (Layout(3, 1, 2), 16, 1, "model_parallel=2 does not divide the cluster's 3"),
        (*(Layout(8, 3, 2), 16, 1), "fsdp=3 does not divide the cluster's 4"),
        (*(Layout(3), 16, 1), "batch_size=16 does not divide over 3 devices; 18 would"),
        (*(Layout(12, 3, 2), 16, 1), "with model_parallel=2; 18 would"),
        (*(Layout(8), 16, 4), "does not divide over 8 devices; 32 would"),
    ],
)
def test_devices_that_cannot_share_a_batch_are_refused(
    layout, batch_size, parts, words
):
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        devices.check(layout, batch_size, parts)


def test_a_mesh_has_the_devices_wanted():
    assert devices.mesh(Layout(4, 2, 1), 8).shape == {"data": 2, "fsdp": 2, "model": 1}
    with pytest.raises(errors.SettingsError, match="devices_per_cluster=99: this"):
        devices.mesh(Layout(99), 99)
    with pytest.raises(errors.SettingsError, match="batch_size=9 does not divide"):
        devices.mesh(Layout(), 9)
