"""What a peer has sent: tensors that wait, and of the rest the latest of each kind."""

from nebula_jax.communication.wire import frames, receive_queue


def test_the_latest_of_each_kind_is_kept():
    found = receive_queue.ControlMessages()
    kinds = (found.welcome, found.stop, found.step_done, found.has_ended)
    assert kinds == (None, None, 0, False)
    found.take(frames.Welcome(7, b"channels"))
    assert (found.welcome, found.formats, found.step_done) == (7, b"channels", 7)
    for step in (9, 8):  # a token never takes back an earlier one
        found.take(frames.StepDone(step))
        assert found.step_done == 9
    found.take(frames.Stop(12))
    assert (found.stop, found.has_ended) == (12, False)
    found.take(frames.End())
    assert found.has_ended


def test_nothing_is_read_while_what_waits_takes_a_mebibyte_of_memory():
    """However small the tensors: each takes some memory itself."""
    found = receive_queue.ReceiveQueue()
    found.add_channel()
    for step in range(receive_queue.MAX_BYTES // receive_queue.TENSOR_OVERHEAD):
        assert found.has_room()
        found.put(frames.Tensor(0, step, 0, [b""]))
    assert not found.has_room()
    found.waiting.append("another channel")  # a caller that waits for what is behind
    assert found.has_room()
    found.waiting.clear()
    found.take(0)
    assert found.has_room()
