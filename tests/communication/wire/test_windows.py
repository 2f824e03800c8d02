import pytest

from nebula_jax.communication.wire import frames, windows


def test_two_tensors_or_16_mebibytes_wait_for_an_acknowledgement():
    """Whichever is more: a large tensor waits for no other one's acknowledgement."""
    size = 2**22
    window = windows.SendWindow()
    for step in range(4):
        assert window.can_send is True
        window.add(frames.Tensor(0, step, 0, [bytes(size)]))
    assert window.can_send is False
    window = windows.SendWindow()
    for step in range(2):
        assert window.can_send is True
        window.add(frames.Tensor(0, step, 0, [bytes(2**24)]))
    assert window.can_send is False


def test_several_tensors_have_room_if_all_of_them_fit(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1)
    monkeypatch.setattr(windows, "WINDOW_FRAMES", 6)
    window = windows.SendWindow()
    window.reserved = 100
    for step in range(3):
        window.add(frames.Tensor(0, step, 0, [bytes(20)]))
    assert window.has_room(40)
    assert window.has_room(40, tensors=3)
    assert not window.has_room(40, tensors=4)  # frames
    assert not window.has_room(41, tensors=2)


@pytest.mark.parametrize(("nbytes", "count"), [(2**20 - 1, 2), (2**20, 1), (0, 64)])
def test_an_acknowledgement_is_due_after_a_mebibyte_or_64_frames(nbytes, count):
    window = windows.ReceiveWindow()
    for number in range(1, count + 1):
        assert window.is_due is False
        window.add(nbytes)
        assert window.count == number
    assert window.is_due is True
    assert window.acknowledge() == count
    assert window.is_due is False
