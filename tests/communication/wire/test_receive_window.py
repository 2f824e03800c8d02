import pytest

from nebula_jax.communication.wire import receive_window


@pytest.mark.parametrize(("nbytes", "count"), [(2**20 - 1, 2), (2**20, 1), (0, 64)])
def test_an_acknowledgement_is_due_after_a_mebibyte_or_64_frames(nbytes, count):
    window = receive_window.ReceiveWindow()
    for number in range(1, count + 1):
        assert window.is_due is False
        window.add(nbytes)
        assert window.count == number
    assert window.is_due is True
    assert window.acknowledge() == count
    assert window.is_due is False
