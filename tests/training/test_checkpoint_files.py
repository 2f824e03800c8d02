"""Which checkpoints count, in what order they are written, what is ever removed."""

import errno
import os
import pathlib
import shutil
from unittest import mock

import pytest

from nebula_jax import disk as real_disk
from nebula_jax.training import checkpoint_files

ABOUT = {"cluster": "source", "settings": {"--steps": 9}}


def differs(about):
    return "" if about == ABOUT else "--steps=8, this one has 9"


class Crash(BaseException):
    """The process, or the machine, ends here."""


CHANGES = ("make_folder", "write", "rename", "remove")


class Disk:
    """The real disk, until operation number `fails_at`, which raises `error` half-way.
    It flushes nothing, which would take most of these tests' time."""

    def __init__(self, fails_at=None, error=None, counted=CHANGES):
        self.count, self.fails_at, self.error = 0, fails_at, error
        self.counted = counted

    def __getattr__(self, name):
        def operation(*arguments):
            self.count += name in self.counted
            if name in self.counted and self.count == self.fails_at:
                self.half(name, *arguments)
                raise self.error
            return None if name == "sync" else getattr(real_disk, name)(*arguments)

        return operation

    def half(self, name, path, *arguments):
        if name == "write":
            path.write_bytes(arguments[0][:10])
        elif name == "remove" and path.is_dir():
            for first in real_disk.files(path)[:1]:
                (path / first).unlink()


class SyncedDisk:
    """The real disk, which asserts that what gets a final name is durable."""

    def __init__(self):
        self.dirty, self.final = set(), []

    def __getattr__(self, name):
        return getattr(real_disk, name)

    def write(self, path, data):
        real_disk.write(path, data)
        self.dirty |= {path, path.parent}

    def sync(self, path):
        real_disk.sync(path)
        self.dirty.discard(path)

    def rename(self, old, new):
        if not new.suffix:
            self.final.append(new.name)
            inside = {old, *(old / name for name in self.files(old))}
            inside |= {path.parent for path in inside if path != old}
            assert not inside & self.dirty
        real_disk.rename(old, new)
        self.dirty.add(new.parent)


def on(disk):
    return mock.patch.object(checkpoint_files, "disk", disk)


@pytest.fixture(autouse=True)
def flushes_nothing():
    with on(Disk()):
        yield


def opened(path, messages=None):
    log = print if messages is None else messages.append
    return checkpoint_files.Folder(path, differs, log)


def save(saved, *steps, about=ABOUT, keep=3):
    for step in steps:

        def write_arrays(folder, step=step):
            disk = checkpoint_files.disk
            disk.make_folder(folder / "deep" / "er")
            for name in ("a", "deep/b", "deep/er/c"):
                disk.write(folder / name, f"{name} of {step}".encode())

        saved.save(step, about, write_arrays, keep)


def names(path):
    return sorted(each.name for each in path.iterdir())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


def test_the_newest_are_kept(folder):
    saved = opened(folder)
    save(saved, 10, 20, 30, 40)
    assert saved.steps == opened(folder).steps == [20, 30, 40]
    assert names(folder) == ["00000020", "00000030", "00000040"]
    assert checkpoint_files.about(folder, 40) == ABOUT
    assert (folder / "00000040" / "deep" / "b").read_text() == "deep/b of 40"


def test_steps_of_more_digits_are_kept_and_superseded_alike(folder):
    for step in (99_999_900, 100_000_000, 2**31 - 1):
        save(opened(folder), step, keep=1)
        saved = opened(folder)
        assert saved.steps == [step]
        saved.go_on_from(step - 1)  # sets it aside, until it is saved again
        assert names(folder) == [f"{step:08d}.later"]
        save(saved, step, keep=1)
        assert names(folder) == [f"{step:08d}"]
    (folder / "100000001.partial").mkdir()
    opened(folder).go_on_from(2**31 - 1)
    assert names(folder) == ["2147483647"]


def test_all_of_a_checkpoint_is_durable_before_it_has_its_name(folder):
    disk = SyncedDisk()
    with on(disk):
        save(opened(folder), 10, 20)
    assert disk.final == ["00000010", "00000020"]
    assert not disk.dirty, "the name itself is not durable"


encode = checkpoint_files.encode_manifest
MANIFESTS = {
    "empty": b"",
    "half": b'{"step": 20,',
    "object": b"{}",
    "null": b"null",
    "list": b"[]",
    "number": b"20",
    "deep": b"[" * 100_000,
    "binary": b"\xff\xfe\x00",
    "types": b'{"step":20,"about":3,"files":[1],"digest":""}',
    "no_files": encode(20, ABOUT, {}),
    "other_step": encode(10, ABOUT, {"a": "00"}),
    "other_run": encode(20, {"cluster": "x"}, {"a": "00"}),
    "other_file": encode(20, ABOUT, {"\0": "00"}),
}
DAMAGES = {
    "truncated": ("deep/b", b"deep"),
    "missing": ("deep/b", None),
    "flipped": ("a", b"a of 30"),
    "no_manifest": ("manifest.json", None),
    **{name: ("manifest.json", data) for name, data in MANIFESTS.items()},
}


def harm(checkpoint, damage):
    name, data = DAMAGES[damage]
    if data is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_left_aside_and_never_removed(folder, damage):
    save(opened(folder), 10, 20)
    harm(folder / "00000020", damage)
    left = {name: (folder / "00000020" / name) for name in ("a", "deep/er/c")}
    left = {name: path.read_bytes() for name, path in left.items()}
    messages = []
    saved = opened(folder, messages)
    assert saved.steps == [10]
    (message,) = messages
    assert message.startswith(f"checkpoint of step 20 in {folder} is damaged (")
    saved.go_on_from(10)
    assert "is set aside as 00000020.damaged" in messages[-1]
    save(saved, 20, 30, 40, 50)
    assert names(folder) == [f"000000{n}" for n in ("20.damaged", "30", "40", "50")]
    for name, data in left.items():
        assert (folder / "00000020.damaged" / name).read_bytes() == data
    messages.clear()
    assert opened(folder, messages).steps == [30, 40, 50]
    assert messages == []


def test_the_same_step_may_be_damaged_twice(folder):
    save(opened(folder), 10, 20)
    for _ in range(2):
        harm(folder / "00000020", "missing")
        saved = opened(folder)
        saved.go_on_from(10)
        save(saved, 20)
    aside = ["00000020.damaged", "00000020.damaged-2"]
    assert names(folder) == ["00000010", "00000020", *aside]


@pytest.mark.parametrize("damage", ["flipped", "no_manifest", "half"])
def test_checkpoints_of_which_none_can_be_used_are_an_error(folder, damage):
    """The run does not begin at step 0, and touches nothing."""
    save(opened(folder), 10, 20)
    (folder / "00000010" / "a").unlink()
    harm(folder / "00000020", damage)
    (folder / "00000030.partial").mkdir()
    before = sorted(folder.rglob("*"))
    words = r"none that can be used \(step 10: a is missing; step 20: .*workdir"
    with pytest.raises(checkpoint_files.CheckpointError, match=words):
        opened(folder)
    assert sorted(folder.rglob("*")) == before


def test_no_bit_of_a_manifest_flips_unnoticed():
    about = ABOUT | {"position": {"epoch": 3, "row": 17}}
    data = encode(20, about, {"a": "0" * 64, "b": "1" * 64})
    found = checkpoint_files.decode_manifest(data, 20)
    for bit in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            other = checkpoint_files.decode_manifest(bytes(flipped), 20)
        except ValueError:
            continue
        assert other == found  # a kind of space has become another


def test_metadata_is_compared_where_digests_are_not(folder):
    """What can be refused without reading arrays is refused before they are made."""
    save(opened(folder), 10, 20)
    harm(folder / "00000020", "half")
    assert checkpoint_files.newest_about(folder) == ABOUT
    harm(folder / "00000010", "no_manifest")
    with pytest.raises(checkpoint_files.CheckpointError, match="step 10: manifest"):
        checkpoint_files.newest_about(folder)


def test_later_checkpoints_are_kept_until_the_run_has_passed_them(folder):
    messages = []
    save(opened(folder), 10, 20, 30)
    saved = opened(folder, messages)
    saved.go_on_from(10)
    assert saved.steps == [10]
    assert names(folder) == ["00000010", "00000020.later", "00000030.later"]
    assert "00000030 is set aside as 00000030.later" in messages[-1]
    save(saved, 20)
    assert names(folder) == ["00000010", "00000020", "00000030.later"]
    saved = opened(folder)
    saved.go_on_from(10)  # again, before the other was passed
    assert names(folder) == ["00000010", "00000020.later", "00000030.later"]
    save(saved, 30)
    assert names(folder) == ["00000010", "00000030"]


def test_later_checkpoints_of_another_run_are_not_removed(folder):
    save(opened(folder), 10)
    opened(folder).go_on_from(0)  # all clusters began anew
    other = checkpoint_files.Folder(folder, lambda about: "other", print)
    save(other, 20, about={"cluster": "other"})
    assert names(folder) == ["00000010.later", "00000020"]


def test_what_an_interrupted_save_left_is_removed_and_nothing_else(folder):
    save(opened(folder), 10)
    torn = ["00000020.partial"]
    foreign = ["notes", "00000040.partial.txt", "20", "000000050", "x.partial"]
    for name in (*torn, *foreign):
        (folder / name).mkdir()
        (folder / name / "file").write_text("")
    saved = opened(folder)
    saved.go_on_from(10)
    assert names(folder) == sorted(["00000010", *foreign])
    save(saved, 20, 30, 40, keep=1)
    assert names(folder) == sorted(["00000040", *foreign])


def test_a_checkpoint_of_the_step_that_is_saved_is_not_lost(folder):
    save(opened(folder), 10)
    save(opened(folder), 10)
    assert names(folder) == ["00000010"]
    harm(folder / "00000010", "missing")
    (folder / "00000010").rename(folder / "00000020")
    saved = opened(folder.parent / "elsewhere")
    saved.path = folder  # as if the damage had come after the start
    save(saved, 20)
    assert names(folder) == ["00000020", "00000020.damaged"]


def a_life(folder, disk):
    """Opens, goes on from 20, saves 30 and 40: what can fail, and how far it came."""
    log = []
    with on(disk):
        saved = opened(folder, log)
        saved.go_on_from(20)
        save(saved, 30, 40, keep=2)
    return log


def error_or_log(folder, disk):
    """What a person reads of a life: the error alone, or the messages."""
    try:
        return "\n".join(a_life(folder, disk))
    except checkpoint_files.CheckpointError as error:
        return str(error)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder in which everything may happen: later, damaged and torn ones."""
    folder = tmp_path_factory.mktemp("begun") / "checkpoints"
    save(opened(folder), 10, 20, 30, 35, keep=4)
    harm(folder / "00000010", "missing")
    (folder / "00000040.partial").mkdir()
    return folder


def copy(begun, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(begun, folder)
    return folder


def test_after_a_crash_at_any_operation_the_newest_whole_one_is_there(begun, tmp_path):
    disk = Disk()
    a_life(copy(begun, tmp_path), disk)
    reached = []
    for number in range(1, disk.count + 1):
        folder = copy(begun, tmp_path)
        with pytest.raises(Crash):
            a_life(folder, Disk(number, Crash()))
        messages = []
        saved = opened(folder, messages)
        assert all("step 10" in message for message in messages)
        assert saved.steps
        newest = max(step for step in saved.steps)
        reached.append(newest)
        if newest in (20, 40):  # else its later ones were not set aside yet
            saved.go_on_from(newest)
            assert (folder / f"{newest:08d}" / "a").read_text() == f"a of {newest}"
        save(saved, 50)
        assert saved.steps[-1] == 50
        assert any(name.startswith("00000010") for name in names(folder))
        assert not any(name.endswith(".partial") for name in names(folder))
    assert {20, 30, 35, 40} == {*reached}


@pytest.mark.parametrize(
    ("number", "operations"),
    [
        (errno.ENOSPC, CHANGES),
        (errno.EIO, CHANGES),
        (errno.EIO, ("names", "files", "read", "digest")),
        (errno.EIO, ("sync",)),
    ],
)
def test_a_disk_that_refuses_any_operation_is_one_error_and_nothing_is_lost(
    begun, tmp_path, number, operations
):
    error = OSError(number, os.strerror(number))
    disk = Disk(counted=operations)
    a_life(copy(begun, tmp_path), disk)
    refused = 0
    for count in range(1, disk.count + 1):
        folder = copy(begun, tmp_path)
        text = error_or_log(folder, Disk(count, error, operations))
        assert os.strerror(number) in text
        refused += "\n" not in text
        saved = opened(folder)
        assert 20 in saved.steps or 40 in saved.steps
        saved.go_on_from(max(saved.steps))
        save(saved, 50)  # the disk has room again
        assert saved.steps[-1] == 50
    assert refused


def test_a_failed_save_leaves_no_files(folder):
    saved = opened(folder)
    save(saved, 10)

    def write_arrays(folder: pathlib.Path) -> None:
        (folder / "a").write_text("half")
        raise ValueError("tensorstore: key: No space left on device [tensorstore]")

    words = f"could not save step 20 in {folder}: No space left on device$"
    with pytest.raises(checkpoint_files.CheckpointError, match=words):
        saved.save(20, ABOUT, write_arrays, 3)
    assert names(folder) == ["00000010"]
    assert saved.steps == [10]
