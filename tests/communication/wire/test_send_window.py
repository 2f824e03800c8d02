from nebula_jax.communication.wire import frames, send_window


def test_two_tensors_or_16_mebibytes_wait_for_an_acknowledgement():
    """Whichever is more: a large tensor waits for no other one's acknowledgement."""
    size = 2**22
    window = send_window.SendWindow()
    for step in range(4):
        assert window.can_send is True
        window.add(frames.Tensor(0, step, 0, [bytes(size)]))
    assert window.can_send is False
    window = send_window.SendWindow()
    for step in range(2):
        assert window.can_send is True
        window.add(frames.Tensor(0, step, 0, [bytes(2**24)]))
    assert window.can_send is False
