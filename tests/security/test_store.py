"""The file of accounts: who can use it, what it takes for whole, and kill -9."""

import json
import os
import pathlib
import random
import re
import sqlite3
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
INSERT = "INSERT INTO accounts VALUES ('a', 7, 'active', 1, NULL, 0)"


@pytest.fixture
def path(tmp_path):
    store_lib.create(tmp_path / "identity.sqlite")
    return tmp_path / "identity.sqlite"


def modes(folder):
    return {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}


def refused(path, words):
    with pytest.raises(StoreError, match=re.escape(words)) as why:
        Store(path)
    assert str(path) in str(why.value)
    assert "\n" not in str(why.value)


def python(*arguments):
    """Starts another Python."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_only_this_user_can_use_the_file_and_those_beside_it(path):
    mask = os.umask(0)
    try:
        store = Store(path)
        with store.writing() as connection:
            connection.execute(INSERT)
        names = {f"identity.sqlite{end}" for end in ("", "-wal", "-shm")}
        assert modes(path.parent) == dict.fromkeys(names, 0o600)
    finally:
        os.umask(mask)
    store.close()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602, 0o601])
def test_a_file_that_others_can_use_is_refused(path, mode):
    path.chmod(mode)
    words = f"others can use it (mode {mode:04o}): chmod 600 {path}"
    with pytest.raises(private_files.PrivateFileError, match=re.escape(words)):
        Store(path)


def test_a_link_a_folder_and_a_file_of_another_user_are_refused(path, monkeypatch):
    link = path.with_name("link.sqlite")
    link.symlink_to(path)
    for wrong in (link, path.parent):
        with pytest.raises(private_files.PrivateFileError, match="a file has to be"):
            Store(wrong)
    monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(private_files.PrivateFileError, match="run as its owner"):
        Store(path)


def test_the_settings_that_its_promises_rest_on(path):
    store = Store(path)
    wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    found = {each: store.rows(f"PRAGMA {each}")[0][0] for each in wanted}
    assert found == wanted
    tables = store.rows("PRAGMA table_list")
    strict = {row["name"]: row["strict"] for row in tables}
    ours = {each for each in strict if not each.startswith("sqlite_")}
    assert len(ours) == 3
    assert all(strict[each] for each in ours)
    with (
        pytest.raises(StoreError, match="cannot store TEXT"),
        store.writing() as connection,
    ):
        connection.execute(INSERT.replace("1, NULL", "'many', NULL", 1))
    with (
        pytest.raises(StoreError, match=r"a rule of the tables \(FOREIGN"),
        store.writing() as connection,
    ):
        connection.execute(
            "INSERT INTO grants (subject, handle, state) VALUES ('a', 'b', 'active')"
        )
    assert store.findings() == []
    store.close()


def test_what_fails_half_way_is_undone(path):
    store = Store(path)

    def write_and_fail():
        with store.writing() as connection:
            connection.execute(INSERT)
            raise OSError("audit log full")

    with pytest.raises(OSError, match="audit log full"):
        write_and_fail()
    assert not store.rows("SELECT * FROM accounts")
    store.close()


def test_a_second_creation_changes_nothing(path):
    before = path.read_bytes()
    store_lib.create(path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["identity.sqlite"]


def test_a_missing_file_names_the_command(tmp_path):
    refused(tmp_path / "identity.sqlite", "not there: nebula init or nebula join")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be made"):
        store_lib.create(tmp_path / "file" / "identity.sqlite")


def test_another_version_is_refused_and_stays_as_it_is(path):
    for version in (2, 4):
        with sqlite3.connect(path) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
        connection.close()
        before = path.read_bytes()
        refused(path, f"has version {version}, and this Nebula reads 3: use the one")
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is no file of accounts"),
        (b"no database", "the file is damaged: put a copy of it back"),
        (b"SQLite format 3\x00" + bytes(1000), "identity.sqlite"),
    ],
)
def test_another_file_in_its_place(path, contents, words):
    path.write_bytes(contents)
    refused(path, words)


def test_the_database_of_another_program(path):
    path.write_bytes(b"")
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE accounts (name)")
    connection.close()
    refused(path, "is no file of accounts: put a copy of it back")


def test_damage_anywhere_is_an_error_in_one_line_and_nothing_else(tmp_path):
    here = tiny_accounts.begin(tmp_path)
    tiny_accounts.person(here, "ana")
    tiny_accounts.handle(here)
    tiny_accounts.grant(here, "ana", grants.Budget(1000))
    here.close()
    path = tmp_path / "identity.sqlite"
    whole = path.read_bytes()
    generator, found = random.Random(0), []
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(40):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        path.write_bytes(damaged[: generator.choice([len(whole), len(whole) // 2])])
        try:
            with tiny_accounts.reopen(tmp_path) as here:
                here.of_user(tiny_accounts.USERS["ana"])
                given = grants.Grants(here)
                given.use("ana", "corpus-es", 1, 1, tiny_accounts.NOW)
                here.move("ana", "suspend")
                found += here.store.findings()
        except errors.NebulaError as error:
            found.append(str(error))
    assert len(found) > 50
    assert not [each for each in found if "\n" in each]


def test_a_full_disk_changes_nothing(path):
    store = Store(path)
    pages = store.rows("PRAGMA page_count")[0][0]
    store.rows(f"PRAGMA max_page_count = {pages}")

    def write():
        with store.writing() as connection:
            connection.execute(INSERT)
            query = "UPDATE accounts SET name = ?"
            connection.execute(query, ("a" * 100_000,))

    words = f"{path}: the disk is full: free some of it"
    with pytest.raises(StoreError, match=re.escape(words)):
        write()
    assert not store.rows("SELECT * FROM accounts")
    store.close()


def test_a_process_that_hangs_in_a_transaction_is_named(path, monkeypatch):
    first = Store(path)
    monkeypatch.setattr(store_lib, "BUSY_SECONDS", 0.05)
    second = Store(path)
    with first.writing():
        with (
            pytest.raises(StoreError, match="another process has been writing"),
            second.writing(),
        ):
            pass
        assert second.rows("SELECT name FROM accounts") == []  # readers go on
    with second.writing():
        pass
    first.close()
    second.close()


@pytest.mark.parametrize("action", ["use", "give", "suspend", "add", "charge"])
def test_killed_between_any_two_statements_nothing_is_half_done(tmp_path, action):
    killed_writer.prepare(tmp_path)
    child = python(killed_writer.__file__, tmp_path, action)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    before, *killed, after = map(json.loads, output.splitlines())
    assert len(killed) >= 3  # BEGIN, a change at least, COMMIT
    for state in killed:
        assert state == before
    assert after != before
    assert after["findings"] == []
