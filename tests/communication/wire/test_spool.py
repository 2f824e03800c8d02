import errno
import os

import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.communication.wire import frames, send_window, spool


def tensor(step, *sizes):
    random = np.random.RandomState(step)
    buffers = [random.randint(0, 256, size).astype(np.uint8) for size in sizes]
    return frames.Tensor(0, step, 0, buffers)


def values(message):
    return [bytes(buffer) for buffer in message.buffers]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("5 kB", 5000),
        ("500MB", 5 * 10**8),
        ("2gb", 2 * 10**9),
    ],
)
def test_sizes_are_read(text, size):
    assert spool.from_string(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5GB", "2GiB", "GB", "²MB", "1e9", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(errors.SettingsError, match="expected bytes, such as 500MB"):
        spool.from_string(text)


def test_what_is_stored_comes_back_in_any_order_of_sizes_round_the_ring(tmp_path):
    kept = spool.Spool(1000, tmp_path, memory=0)
    random, waiting = np.random.RandomState(0), []
    for step in range(200):
        sent = tensor(step, *random.randint(1, 150, 2))
        while kept.on_disk + frames.tensor_bytes(sent) > 1000:
            before, stored = waiting.pop(0)
            assert values(kept.load(stored)) == values(before)
            kept.release(stored)
        stored = kept.store(sent)
        assert frames.tensor_bytes(stored) == frames.tensor_bytes(sent)
        waiting.append((sent, stored))
    for sent, stored in waiting:  # again, as on a new connection
        assert values(kept.load(stored)) == values(sent)
    assert 850 < kept.most_on_disk <= 1000


def test_the_file_has_no_name_and_its_room_is_given_back(tmp_path):
    kept = spool.Spool(1000, tmp_path / "generator-0", memory=0)
    stored = [kept.store(tensor(step, 400)) for step in range(2)]
    assert list((tmp_path / "generator-0").iterdir()) == []
    for message in stored:
        assert os.fstat(kept._file.fileno()).st_size == 800
        kept.release(message)
    assert os.fstat(kept._file.fileno()).st_size == 0
    kept.close()


@pytest.mark.parametrize("function", ["pwrite", "pread"])
def test_a_disk_that_fails_is_an_error_that_names_it(tmp_path, monkeypatch, function):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = spool.Spool(1000, tmp_path, memory=0)
    stored = kept.store(tensor(1, 400))
    monkeypatch.setattr(spool.os, function, fail)
    words = f"--spool: could not .* in {tmp_path}: No space left on device"
    with pytest.raises(spool.SpoolError, match=words):
        kept.store(tensor(2, 400)) if function == "pwrite" else kept.load(stored)


@pytest.fixture
def full(tmp_path, monkeypatch):
    """A window that holds two tensors of 100 bytes, and a spool for five."""
    monkeypatch.setattr(send_window, "WINDOW_BYTES", 1)
    window = send_window.SendWindow()
    window.spool = spool.Spool(500, tmp_path, memory=300)
    return window


def test_a_spool_takes_what_the_window_does_not_and_no_more(full):
    sent = [tensor(step, 100) for step in range(5)]
    for number, message in enumerate(sent):
        assert full.can_send == (number < 2)
        assert full.has_room(100)
        full.add(full.stored(message))
    assert not full.has_room(100)
    assert (full.most_tensors, full.most_bytes) == (5, 500)
    assert full.spool.most_on_disk == 200  # the rest is in memory
    for message in sent:
        assert values(full.next()) == values(message)
    full.rewind()  # a new connection: all of it again
    assert [values(full.next()) for _ in sent] == [values(each) for each in sent]
    full.acknowledge(4)
    assert full.has_room(100)
    assert full.spool.on_disk == 100
    full.acknowledge(5)
    assert full.spool.on_disk == 0


def test_without_a_spool_a_full_window_is_full(full):
    full.spool = spool.Spool()
    for step in range(2):
        assert full.has_room(100)
        full.add(full.stored(tensor(step, 100)))
    assert not full.has_room(1)
    assert full.most_tensors == 0  # nothing more than on a good line
