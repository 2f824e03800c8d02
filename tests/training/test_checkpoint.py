import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.training import checkpoint


def state(value):
    return {
        "w": jnp.arange(1000.0).reshape(10, 100) * value,
        "step": jnp.int32(value),
        "rng": jax.random.key_data(jax.random.key(value)),
        "empty": (),
    }


def like(tree):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        tree,
    )


@pytest.fixture
def messages():
    return []


def save(folder, *steps, keep=3):
    for step in steps:
        checkpoint.save(folder, step, state(step), {"position": step * 2}, keep)


def test_a_state_comes_back_bit_for_bit_with_what_was_said_about_it(tmp_path):
    save(tmp_path, 7)
    restored, about = checkpoint.restore(tmp_path, 7, like(state(7)))
    jax.tree.map(np.testing.assert_array_equal, restored, state(7))
    assert about == checkpoint.newest_about(tmp_path) == {"position": 14}
    assert checkpoint.newest_about(tmp_path / "nowhere") == {}


def test_the_newest_are_kept(tmp_path, messages):
    save(tmp_path, 10, 20, 30, 40)
    assert checkpoint.verified_steps(tmp_path, messages.append) == [20, 30, 40]
    assert messages == []


@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped", "manifest"])
def test_a_damaged_checkpoint_is_told_and_left_aside(tmp_path, messages, damage):
    save(tmp_path, 10, 20)
    victim = max(
        (path for path in (tmp_path / "00000020").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data = victim.read_bytes()
    if damage == "truncated":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "missing":
        victim.unlink()
    elif damage == "flipped":
        victim.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    else:
        (tmp_path / "00000020.json").write_text("{")
    assert checkpoint.verified_steps(tmp_path, messages.append) == [10]
    assert len(messages) == 1
    assert "checkpoint of step 20" in messages[0]
    assert "damaged" in messages[0]


def test_a_checkpoint_without_manifest_was_never_finished(tmp_path, messages):
    save(tmp_path, 10, 20)
    (tmp_path / "00000020.json").unlink()
    assert checkpoint.verified_steps(tmp_path, messages.append) == [10]
    save(tmp_path, 20)
    assert checkpoint.verified_steps(tmp_path, messages.append) == [10, 20]


def test_what_lies_beyond_is_dropped(tmp_path, messages):
    save(tmp_path, 10, 20, 30)
    (tmp_path / "00000030.json").unlink()
    (tmp_path / "00000040.orbax-checkpoint-tmp-1").mkdir()
    checkpoint.discard_after(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000010",
        "00000010.json",
    ]


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
    assert checkpoint.verified_steps(tmp_path, print) == [10]


ON_A_FULL_DISK = """
import pathlib, resource, signal, sys
import jax.numpy as jnp
from nebula_jax.training import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    checkpoint.save(pathlib.Path(sys.argv[1]), 20, {"w": jnp.arange(1e5)}, {}, 3)
except checkpoint.CheckpointError as error:
    sys.exit(str(error))
"""


def test_a_full_disk_is_an_error_and_what_was_there_stays(tmp_path):
    """In a process whose files may not grow beyond 4 kB, as if the disk were full."""
    save(tmp_path, 10)
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == f"could not save step 20 in {tmp_path}: File too large\n"
    assert checkpoint.verified_steps(tmp_path, print) == [10]
    assert not list(tmp_path.glob("00000020*"))
