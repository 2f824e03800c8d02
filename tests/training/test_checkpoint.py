import asyncio
import shutil
import threading
import time

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.training import checkpoint, checkpoint_files


def state(value):
    return {
        "w": jnp.arange(1000.0).reshape(10, 100) * value,
        "step": jnp.int32(value),
        "rng": jax.random.key_data(jax.random.key(value)),
        "empty": (),
    }


def like(tree):
    return checkpoint.abstract(tree, jax.tree.map(lambda leaf: leaf.sharding, tree))


def opened(folder):
    return checkpoint_files.Folder(folder, lambda about: "", print)


def save(folder, *steps, keep=3):
    saved = opened(folder)
    for step in steps:
        checkpoint.save(saved, step, state(step), {"position": step * 2}, keep)


def test_a_state_comes_back_bit_for_bit_with_its_metadata(tmp_path):
    save(tmp_path, 7)
    restored, about = checkpoint.restore(tmp_path, 7, like(state(7)))
    jax.tree.map(np.testing.assert_array_equal, restored, state(7))
    assert about == checkpoint_files.newest_about(tmp_path) == {"position": 14}
    read = checkpoint.read(tmp_path, 7)
    jax.tree.map(np.testing.assert_array_equal, read["w"], state(7)["w"])


def test_every_file_of_a_checkpoint_is_in_its_manifest(tmp_path):
    """A flip in any of them is found."""
    save(tmp_path, 7)
    for path in sorted((tmp_path / "00000007").rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if data else b"x")
            with pytest.raises(checkpoint.CheckpointError, match="none that can be"):
                opened(tmp_path)
            path.write_bytes(data)
    assert opened(tmp_path).steps == [7]


def test_another_structure_is_an_error(tmp_path):
    save(tmp_path, 10)
    other = like(state(1)) | {"w": jax.ShapeDtypeStruct((3, 3), jnp.float32)}
    with pytest.raises(checkpoint.CheckpointError, match="cannot use"):
        checkpoint.restore(tmp_path, 10, other)


def test_a_disk_with_too_little_room_is_an_error_before_anything_is_written(
    tmp_path, monkeypatch
):
    save(tmp_path, 10)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    words = "could not save step 20 in .*: No space left on device: 0.0 MB are needed"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        save(tmp_path, 20)
    assert opened(tmp_path).steps == [10]


ON_A_FULL_DISK = """
import pathlib, resource, signal, sys
import jax.numpy as jnp
from nebula_jax.training import checkpoint, checkpoint_files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
arrays = {f"w{i}": jnp.arange(1e5) + i for i in range(20)}
try:
    saved = checkpoint_files.Folder(pathlib.Path(sys.argv[1]), lambda about: "", print)
    checkpoint.save(saved, 20, arrays, {"a": 1}, 3)
except checkpoint.CheckpointError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    checkpoint.save(saved, 30, arrays, {"a": 1}, 3)  # there is room again
    sys.exit(str(error))
"""


def test_a_full_disk_is_an_error_and_what_was_there_stays(tmp_path):
    """In a process whose files may not grow beyond 100 kB, as if the disk were full.
    Many writes fail at once, and nothing but the error is printed."""
    save(tmp_path, 10)
    done = children.python("-c", ON_A_FULL_DISK, str(tmp_path), timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"could not save step 20 in {tmp_path}: File too large\n"
    left = opened(tmp_path)
    assert left.steps == [10, 30]
    left.go_on_from(30)  # which removes what writes left that were late to fail
    assert not list(tmp_path.glob("00000020*"))


def test_clusters_that_are_threads_leave_the_event_loops_of_their_process():
    """One begins to save while another does, and ends after it."""
    before = asyncio.get_event_loop_policy()
    begun = threading.Event()

    def save(seconds):
        with checkpoint._checkpointer():
            begun.set()
            time.sleep(seconds)

    threads = [threading.Thread(target=save, args=(each,)) for each in (0.2, 0.4)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    for each in threads:
        each.join()
    assert asyncio.get_event_loop_policy() is before
