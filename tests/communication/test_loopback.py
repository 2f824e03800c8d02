"""Both ends of a channel in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.communication import codecs, loopback

SPEC = {
    "mask": jax.ShapeDtypeStruct((2, 100), jnp.bool_),
    "h": jax.ShapeDtypeStruct((2, 100, 4), jnp.float32),
}


def arrays(seed):
    random = np.random.RandomState(seed)
    mask = np.arange(100) < random.randint(1, 100, (2, 1))
    return {"mask": mask, "h": np.float32(random.randn(2, 100, 4) * mask[..., None])}


def ends(named, name="h", link=None):
    link = link or loopback.Loopback()
    codec = codecs.from_string(named)
    return link.sender(name, SPEC, codec), link.receiver(name, SPEC, codec)


@pytest.mark.parametrize("named", ["identity", "pack_tokens|zstd"])
def test_what_is_sent_is_received_in_order(named):
    sender, receiver = ends(named)
    assert not receiver.has_arrived
    for step in range(3):
        sender.send(step, arrays(step), micro_batch=step)
    for step in range(3):
        assert receiver.has_arrived
        received = receiver.recv(step, micro_batch=step)
        jax.tree.map(np.testing.assert_array_equal, received, arrays(step))
    assert not receiver.has_arrived


def test_nothing_there_is_an_error_not_a_wait():
    _, receiver = ends("identity")
    with pytest.raises(errors.NebulaError, match="nobody has sent h of step 1"):
        receiver.recv(1)


def test_bytes_are_counted_by_channel():
    link = loopback.Loopback()
    hidden, _ = ends("identity", "hidden", link)
    packed, _ = ends("pack_tokens", "packed", link)
    hidden.send(1, arrays(0))
    hidden.send(2, arrays(0))
    assert link.sent == {"hidden": 2 * (200 + 200 * 4 * 4)}
    packed.send(1, arrays(0))
    assert 0 < link.sent["packed"] < link.sent["hidden"] / 2


def test_what_comes_next_is_seen_before_it_is_taken_and_may_be_dropped():
    sender, receiver = ends("identity")
    assert receiver.next_step is None
    for step in (4, 8):
        sender.send(step, arrays(step))
    assert receiver.next_step == 4
    assert receiver.next_step == 4  # it is still there
    receiver.drop()
    assert receiver.next_step == 8
    jax.tree.map(np.testing.assert_array_equal, receiver.recv(8), arrays(8))
    assert receiver.next_step is None
    assert not receiver.has_arrived
