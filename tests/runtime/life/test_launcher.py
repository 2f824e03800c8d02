"""`--cluster=all`, with processes that train nothing (`helpers/tiny_cluster`)."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import types

import psutil
import pytest
import tiny_cluster
import tiny_runs

from nebula_jax import errors, printable
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import launcher, process, processes, restarts
from nebula_jax.runtime.records import checkpoints
from nebula_jax.security.tls import certificates, credentials
from nebula_jax.training import checkpoint_files


@pytest.fixture
def start(tmp_path):
    """Starts a launcher in `tmp_path`; it and its clusters end with the test."""
    started = []

    def run(tls="off", restart=0):
        path = os.pathsep.join(
            [tiny_runs.QUICK_PATH, str(tiny_runs.ROOT / "tests/helpers")]
        )
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tiny_cluster"),
                *(f"--tls={tls}", f"--folder={tmp_path}", f"--restart={restart}"),
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
    for launched in started:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(launched.pid).children():
                child.kill()
        launched.kill()
        launched.communicate()


def clusters(process, folder, before=()):
    """Waits until a launcher's clusters work, in other processes than those `before` a
    restart; cluster -> its process."""
    files = [folder / name for name in tiny_cluster.CLUSTERS]
    old = {str(each.pid) for each in before}
    deadline = time.monotonic() + 60
    while not all(each.exists() and each.read_text() not in old for each in files):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return tiny_runs.family_of(process)


def ended(launched, status):
    """What a launcher and its clusters have printed, when it has ended by itself."""
    output, _ = launched.communicate(timeout=30)
    assert launched.returncode == status, output
    return output


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


def test_keys_of_a_run_are_in_no_file_and_a_cluster_has_no_others(start, tmp_path):
    """Even if the launcher is killed."""
    process = start(tls="auto")
    family = clusters(process, tmp_path)
    assert not keys(tmp_path)
    held = {
        name: {
            pathlib.Path(f"/proc/{each.pid}/fd/{fd}").read_bytes()
            for fd in os.listdir(f"/proc/{each.pid}/fd")
            if "memfd:credentials" in os.readlink(f"/proc/{each.pid}/fd/{fd}")
        }
        for name, each in family.items()
    }
    for name, contents in held.items():
        assert len(contents) == 1, name
    assert len(set.union(*held.values())) == len(held)
    found = [credentials.parse(each) for (each,) in held.values()]
    assert len({each.authority for each in found}) == 1
    process.kill()
    tiny_runs.assert_all_gone(family)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == set(tiny_cluster.CLUSTERS)


def test_credentials_that_must_not_be_used_are_named_before_anything_starts(tmp_path):
    own = tmp_path / "own"
    certificates.issue_for_run(own, tiny_cluster.CLUSTERS)
    (own / "dials-0" / "cluster.pem").chmod(0o644)
    settings = connect.Settings(tls=str(own))
    words = f"chmod 600 {own / 'dials-0' / 'cluster.pem'}"
    with (
        pytest.raises(errors.NebulaError, match=re.escape(words)),
        launcher.prepared(tmp_path, tiny_cluster.CLUSTERS, settings),
    ):
        pass


def test_all_start_again_when_one_died_and_only_so_often(start, tmp_path):
    """On the listener's port, and with the credentials that were handed down."""
    launched = start(tls="auto", restart=1)
    family = clusters(launched, tmp_path)
    family["listens"].kill()
    tiny_runs.assert_all_gone(family)
    clusters(launched, tmp_path, family.values())["dials:0"].kill()
    lines = [line for line in ended(launched, 1).splitlines() if "clusters" in line]
    again = "was killed by SIGKILL; all clusters start again from what they have saved"
    assert lines == [
        f"listens {again} (restart 1 of 1)",
        "error: dials:0 was killed by SIGKILL; all clusters ended, after 1 of"
        " restart=1",
    ]
    found = restarts.read(tmp_path, [])
    assert [each["cluster"] for each in found] == ["listens"]


def test_a_cluster_that_refused_is_not_started_again(start, tmp_path):
    """And the credentials of a folder of the user's are left alone."""
    own = tmp_path / "tls"
    certificates.issue_for_run(own, tiny_cluster.CLUSTERS)
    before = sorted(own.rglob("*"))
    launched = start(tls=own, restart=3)
    clusters(launched, tmp_path)
    end(tmp_path, "dials:0", 2)
    end(tmp_path, "listens", process.ENDED_BY_PEER)
    output = ended(launched, 2)
    line = output.splitlines()[-1]
    assert line == "error: dials:0 ended with status 2; all clusters ended"
    assert "start again" not in output
    assert sorted(own.rglob("*")) == before


MESH = ["a", "b", "c"]


def test_in_a_federation_the_peer_is_a_lab_for_all(tmp_path):
    settings = connect.Settings(federation=str(tmp_path), job="j", peer="lab-t")
    reached = {}

    def arguments(name, reach):
        reached[name] = reach.peer
        return ["--help"]

    dials = {name: all_clusters.dialed(name, MESH, "") for name in MESH}
    with launcher.prepared(tmp_path, MESH, settings, dials=dials) as start:
        start("this", arguments)
    assert reached == dict.fromkeys(MESH, "lab-t")


KILLED, GONE = -signal.SIGKILL, process.ENDED_BY_PEER


WORTH = [[KILLED], [KILLED, GONE], [-signal.SIGSEGV, 0]]
WORTH += [[GONE, GONE]]  # a line that was away for too long
NOT_WORTH = [[0, 0], [KILLED, 1], [GONE, 2], [KILLED, process.STOPPED_BY_PEER]]
NOT_WORTH += [[KILLED, 128 + signal.SIGTERM], [-signal.SIGTERM, GONE]]


@pytest.mark.parametrize("statuses", WORTH + NOT_WORTH)
def test_what_is_worth_starting_again(statuses):
    assert processes.must_restart(statuses) == (statuses in WORTH)


SAVED, TERM = 128 + signal.SIGTERM, -signal.SIGTERM


@pytest.mark.parametrize(
    ("ends", "killed", "blamed"),
    [
        ({"a": SAVED, "b": process.STOPPED_BY_PEER}, (), ""),
        ({"a": SAVED, "b": KILLED}, (), "b was killed by SIGKILL"),
        ({"a": SAVED, "b": -signal.SIGSEGV}, (), "b was killed by SIGSEGV"),
        ({"a": SAVED, "b": 1}, (), "b ended with status 1"),
        ({"a": SAVED, "b": 2}, (), "b ended with status 2"),
        ({"b": KILLED, "a": KILLED}, ("a",), "b was killed by SIGKILL"),
        ({"a": KILLED, "b": KILLED}, ("a", "b"), ""),  # Ctrl-C came twice
        ({"a": TERM, "b": KILLED}, ("b",), ""),  # it was just starting
        ({"a": TERM, "b": TERM}, (), ""),
    ],
)
def test_a_run_has_been_stopped_if_no_cluster_died_by_itself(
    tmp_path, ends, killed, blamed
):
    """One that the kernel has killed for its memory has saved nothing."""
    run = processes.Processes(tmp_path, {}, {}, 0)
    run._signal, run._killed = signal.SIGTERM, set(killed)
    lines = []
    screen = types.SimpleNamespace(message=lambda _, text: lines.append(text))
    failed = 2 if ends["b"] == 2 else 1
    assert run._status(ends, screen) == (failed if blamed else SAVED)
    assert lines == ([f"error: {blamed}; all clusters ended"] if blamed else [])


@pytest.mark.parametrize(
    ("saved", "ends", "goes_on"),
    [
        (("a", "b"), {"b": KILLED, "a": GONE}, True),
        (("a", "b"), {"b/1": KILLED, "b": GONE, "a": GONE}, True),
        (("a", "b"), {"b": 1, "a": GONE}, False),  # it would come again
        (("a",), {"b": KILLED, "a": GONE}, False),
    ],
)
def test_after_a_kill_the_same_command_goes_on_if_all_have_saved(
    tmp_path, saved, ends, goes_on
):
    for name in saved:
        folder = checkpoints.folder_of(tmp_path, name) / "00000001"
        folder.mkdir(parents=True)
        manifest = checkpoint_files.encode_manifest(1, {"cluster": name}, {"x": ""})
        (folder / checkpoint_files.MANIFEST).write_bytes(manifest)
    run, lines = processes.Processes(tmp_path, {}, {}, 0), []
    screen = types.SimpleNamespace(message=lambda _, text: lines.append(text))
    assert run._status(ends, screen) == 1
    words = "; all clusters ended; the same command goes on from the last checkpoint"
    assert lines[0].endswith(words) == goes_on


REFUSED = """
import socket, sys, time
for _ in range(1000):
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1]))).close()
    except ConnectionRefusedError:
        sys.exit()
    time.sleep(0.02)
sys.exit("it is still open")
"""


def test_the_port_of_a_cluster_that_has_ended_refuses(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        python, port = [sys.executable, "-S", "-c"], listening.getsockname()[1]
        commands = {
            "a": processes.Command([*python, ""], ()),
            "b": processes.Command([*python, REFUSED, str(port)], ()),
        }
        assert processes.Processes(tmp_path, commands, {"a": listening}, 0).run() == 0


PRINTS = """
import sys
for stream in (sys.stdout, sys.stderr):
    stream.buffer.write(b"a\\x1b[2Jb\\xe2\\x80\\xaec\\xff" + 60_000 * b"x" + b"\\n")
"""


def test_what_clusters_print_does_nothing_to_the_terminal(tmp_path, capsys):
    command = processes.Command([sys.executable, "-S", "-c", PRINTS], ())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        run = processes.Processes(tmp_path, {"g:0": command}, {"g:0": listening}, 0)
        assert run.run() == 0
    printed = capsys.readouterr()
    for text, start in ((printed.out, "a"), (printed.err, "[g:0] a")):
        (line,) = text.splitlines()
        assert line.isprintable()
        assert line.startswith(f"{start}\ufffd[2Jb\ufffdc\ufffdxxx")
        assert len(line) <= printable.LINE_LIMIT + len(start)
