from nebula_jax.communication.wire import frames, windows


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
