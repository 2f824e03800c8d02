"""The file of accounts: who can use it, what it takes for whole, and kill -9."""

import json
import os
import pathlib
import random
import re
import subprocess
import sys

import killed_writer
import pytest
import tiny_accounts

from nebula_jax import errors
from nebula_jax.security import grants, private_files
from nebula_jax.security import store as store_lib
from nebula_jax.security.store import Store, StoreError

ROOT = pathlib.Path(__file__).parents[2]
PARTS = ("accounts", "handles")


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "people.json", PARTS)
    made.create()
    return made


def refused(store, error, words):
    with pytest.raises(error, match=re.escape(words)) as why:
        store.read()
    assert str(store.path) in str(why.value)
    assert "\n" not in str(why.value)


def test_only_this_user_can_use_the_file_and_those_beside_it(tmp_path):
    mask = os.umask(0)
    try:
        store = Store(tmp_path / "people.json", PARTS)
        store.create()
        with store.changing() as tables:
            tables["accounts"]["ana"] = []
    finally:
        os.umask(mask)
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert modes == {"people.json": 0o600, "people.lock": 0o600}


def test_a_file_that_others_can_use_is_refused(store):
    """As `private_files` has it, whose tests hold modes, links and other users."""
    store.path.chmod(0o640)
    words = f"others can use it (mode 0640): chmod 600 {store.path}"
    refused(store, private_files.PrivateFileError, words)


def test_what_fails_half_way_is_undone(store):
    def write_and_fail():
        with store.changing() as tables:
            tables["accounts"]["ana"] = []
            raise OSError("audit log full")

    with pytest.raises(OSError, match="audit log full"):
        write_and_fail()
    assert store.read() == {part: {} for part in PARTS}


def test_a_second_creation_changes_nothing(store):
    with store.changing() as tables:
        tables["handles"]["corpus-es"] = [1]
    store.create()
    assert store.read()["handles"] == {"corpus-es": [1]}


def test_a_missing_file_names_the_command(tmp_path):
    store = Store(tmp_path / "people.json", PARTS)
    refused(store, StoreError, "not there: nebula init or nebula join")


def test_damage_anywhere_is_found(tmp_path):
    here = tiny_accounts.begin(tmp_path)
    tiny_accounts.person(here, "ana")
    tiny_accounts.handle(here)
    tiny_accounts.grant(here, "ana", rows=1000)
    whole, generator = here.store.path.read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        half = generator.randrange(len(damaged))
        for data in (damaged, whole[:half], whole + b" "):
            here.store.path.write_bytes(data)
            with pytest.raises(errors.NebulaError, match=r"damaged|no text") as why:
                grants.Grants(here).use("ana", "corpus-es", 1, tiny_accounts.NOW)
            assert "\n" not in str(why.value)
            assert here.store.path.read_bytes() == data


def test_a_process_that_hangs_in_a_change_is_named(store, monkeypatch):
    monkeypatch.setattr(private_files, "LOCK_SECONDS", 0.05)
    other = Store(store.path, PARTS)
    with store.changing() as tables:
        tables["accounts"]["ana"] = []
        with (
            pytest.raises(private_files.LockedError, match=r"for 0\.05 s; is it sto"),
            other.changing(),
        ):
            pass
        assert other.read()["accounts"] == {}  # readers go on
    with other.changing() as tables:
        assert tables["accounts"] == {"ana": []}


@pytest.mark.parametrize("action", ["use", "suspend"])
def test_killed_between_any_two_lines_nothing_is_half_done(tmp_path, action):
    killed_writer.prepare(tmp_path)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    done = subprocess.run(
        [sys.executable, killed_writer.__file__, tmp_path, action],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    before, *killed, after = map(json.loads, done.stdout.splitlines())
    assert len(killed) > 10
    assert after != before
    # Not yet done, or done and killed before it could say so.
    assert [each for each in killed if each not in (before, after)] == []
    assert killed[0] == before


def test_a_file_never_grows_beyond_what_is_read(store, monkeypatch):
    """Nobody could use it again, nor make it smaller."""
    monkeypatch.setattr(store_lib, "MOST_BYTES", 1000)
    with (
        pytest.raises(StoreError, match="more than 1000 bytes"),
        store.changing() as tables,
    ):
        tables["accounts"]["ana"] = "a" * 1000
    with store.changing() as tables:
        tables["accounts"]["ben"] = []
    assert list(store.read()["accounts"]) == ["ben"]
