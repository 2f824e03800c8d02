"""`--cluster=all`, with processes that train nothing (`helpers/tiny_cluster`)."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import psutil
import pytest
import tiny_cluster
import tiny_runs

from nebula_jax.security import certificates


@pytest.fixture
def start(tmp_path):
    """Starts a launcher in `tmp_path`; it and its clusters end with the test."""
    started = []

    def run(tls="auto"):
        path = os.pathsep.join(
            [str(tiny_runs.ROOT), str(tiny_runs.ROOT / "tests/helpers")]
        )
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tiny_cluster"),
                *(f"--tls={tls}", f"--folder={tmp_path}"),
            ],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children():
                child.kill()
        process.kill()
        process.communicate()


def clusters(process, folder):
    """Waits until all clusters work; cluster -> its process."""
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in tiny_cluster.CLUSTERS):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return tiny_runs.family_of(process)


def end(folder, name, status=0):
    """Tells a cluster to end."""
    partial = folder / f".{name}.end"
    partial.write_text(str(status))
    partial.rename(folder / f"{name}.end")


def keys(folder: pathlib.Path) -> list[pathlib.Path]:
    """Files with a private key."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and b"PRIVATE KEY" in path.read_bytes()
    ]


def test_keys_of_a_run_are_in_no_file_even_if_its_launcher_is_killed(start, tmp_path):
    process = start()
    family = clusters(process, tmp_path)
    assert not keys(tmp_path)
    process.kill()
    tiny_runs.assert_all_gone(family)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == set(tiny_cluster.CLUSTERS)


def test_a_cluster_has_the_key_of_no_other(start, tmp_path):
    process = start()
    family = clusters(process, tmp_path)
    held = {
        name: {
            pathlib.Path(f"/proc/{each.pid}/fd/{fd}").read_bytes()
            for fd in os.listdir(f"/proc/{each.pid}/fd")
            if "memfd:credentials" in os.readlink(f"/proc/{each.pid}/fd/{fd}")
        }
        for name, each in family.items()
    }
    for name, contents in held.items():
        assert len(contents) == 3, name
    assert len(set.intersection(*held.values())) == 1  # the authority's certificate
    for name in family:
        end(tmp_path, name)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_folder_of_the_users_is_left_alone(start, tmp_path):
    own = tmp_path / "tls"
    certificates.issue_for_run(own, tiny_cluster.CLUSTERS)
    before = sorted(own.rglob("*"))
    process = start(tls=own)
    clusters(process, tmp_path)
    for name in tiny_cluster.CLUSTERS:
        end(tmp_path, name)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert sorted(own.rglob("*")) == before


def test_credentials_that_must_not_be_used_are_named_before_anything_starts(
    start, tmp_path
):
    own = tmp_path / "own"
    certificates.issue_for_run(own, tiny_cluster.CLUSTERS)
    (own / "dials-0" / "key.pem").chmod(0o644)
    process = start(tls=own)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    (line,) = output.splitlines()
    assert f"chmod 600 {own / 'dials-0' / 'key.pem'}" in line
    assert not (tmp_path / "listens").exists()
