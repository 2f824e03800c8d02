"""Clusters of several real processes: they meet, and none is lost in silence."""

import contextlib
import ipaddress
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import ports
import pytest
import ranked

from nebula_jax import errors
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster

SOON = 30.0  # seconds, until the others have ended; JAX waits for an hour
MANY = 10_000  # steps


def assert_ended(started, survivors, words, begin):
    """The processes that were left have ended soon, and said why."""
    statuses = started.ends()
    assert time.monotonic() - begin < SOON
    for number in survivors:
        assert re.search(words, started.message(number))
        assert statuses[number] == process.ENDED_BY_PEER
    assert started.printed(0)[-1].startswith("aborted: ") or 0 not in survivors


@pytest.mark.slow  # the next test kills the root, and one below ends process 1
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_ends_the_others(tmp_path, victim):
    started = ranked.Started(tmp_path, {}, {}, steps=MANY)
    started.wait_for_step(3)
    begin = time.monotonic()
    started.processes[victim].kill()
    words = f"^error: process {victim} of this cluster has gone$"
    assert_ended(started, [1 - victim], words, begin)


@pytest.mark.slow
def test_a_process_that_computes_ends_with_its_reason_when_the_root_has_gone(
    tmp_path, monkeypatch
):
    temporary = tmp_path.parent / "t"  # the path of a socket is short
    temporary.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    started = ranked.Started(tmp_path, {}, {"then": "hang"}, steps=MANY)
    started.wait_for_step(3)
    begin = time.monotonic()
    started.processes[0].kill()
    assert list(temporary.iterdir()) == []
    assert_ended(started, [1], "^error: process 0 of this cluster has gone$", begin)
    assert started.printed(1)[-1] == "aborted: process 0 of this cluster has gone"
    assert len(started.errors(1)) == 1  # nor does JAX say anything


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named_after_its_silence(tmp_path, victim):
    started = ranked.Started(tmp_path, {}, {}, steps=MANY, peer_timeout=3.0)
    started.wait_for_step(3)
    begin = time.monotonic()
    started.processes[victim].send_signal(signal.SIGSTOP)
    words = f"^error: process {victim} of this cluster is silent for 3 s .* since step"
    survivor = started.processes[1 - victim]
    assert survivor.wait(60) == process.ENDED_BY_PEER
    started.processes[victim].kill()
    assert_ended(started, [1 - victim], words, begin)


@pytest.mark.slow
def test_a_process_that_hangs_is_named_with_its_place(tmp_path):
    started = ranked.Started(
        tmp_path, {}, {"then": "hang"}, steps=MANY, stuck_timeout=1.0
    )
    words = (
        r"got nothing done for 1 s \(stuck_timeout\), since step 3: process 0 at"
        r" nebula_jax/communication/ranks.py:\d+; process 1 at"
        r" tests/helpers/ranked.py:\d+$"
    )
    statuses = started.ends()
    assert statuses == [process.ENDED_BY_PEER] * 2
    for number in range(2):
        assert re.search(words, started.message(number))


@pytest.mark.slow
def test_a_signal_to_the_root_stops_all_after_the_same_step(tmp_path):
    started = ranked.Started(tmp_path, {}, {}, steps=MANY)
    started.wait_for_step(3)
    assert_stops(started, 0)


def assert_stops(started, victim):
    """A signal to one process stops all after the same step."""
    started.processes[victim].terminate()
    statuses = started.ends()
    assert statuses[victim] == 128 + signal.SIGTERM
    assert set(statuses) <= set(process.SAVED)
    assert started.printed(0) == started.printed(1)
    words = "toy: stopped after step"
    assert all(words in started.message(number) for number in range(2))


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_any_process_ends_the_wait_of_the_root_for_a_peer(tmp_path, victim):
    """The other one waits in a collective, where Python hears of no signal."""
    more = {"connect_timeout": 600.0, "peer_timeout": 600.0}  # not what ends them
    started = ranked.Started(tmp_path, {}, {}, steps=MANY, then="lose", **more)
    started.wait_for_step(3)
    time.sleep(1.0)  # until it is there: if it takes longer, this shows less
    started.processes[victim].terminate()
    assert started.ends() == [128 + signal.SIGTERM, process.ENDED_BY_PEER]
    assert started.message(0).startswith("toy: stopped by SIGTERM while it waited for")
    assert "stopped by SIGTERM while it waited for a peer" in started.message(1)


def test_a_signal_ends_a_process_in_a_collective_before_there_is_a_step(tmp_path):
    started = ranked.Started(tmp_path, {}, {}, then="await")
    started.wait_for_step(0)
    time.sleep(1.0)  # as above
    started.processes[1].terminate()
    assert started.ends() == [process.ENDED_BY_PEER, 128 + signal.SIGTERM]
    assert started.message(0) == "error: process 1 of this cluster has gone"


needs_ipv6 = pytest.mark.skipif(not ports.has_ipv6(), reason="this host has no IPv6")


@needs_ipv6
def test_the_coordinator_listens_at_its_address_alone():
    for host, bound in (
        ("::1", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("localhost", "127.0.0.1"),
    ):
        with cluster._listen((host, 0), 1.0) as made:
            assert made.getsockname()[0] == bound


def test_a_name_that_means_this_host_alone_is_pointed_out(monkeypatch, capsys):
    """As Debian names a host 127.0.1.1: the others would come to nobody."""
    found = socket.getaddrinfo

    def resolve(host, *rest, **more):
        return found("127.0.1.1" if host == "node07" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with cluster._listen(("node07", 0), 1.0) as made:
        assert made.getsockname()[0] == "127.0.1.1"
    words = "coordinator=node07:0 is 127.0.1.1 on this host, to which no other host"
    assert words in capsys.readouterr().err
    cluster._listen(("127.0.0.1", 0), 1.0).close()
    assert not capsys.readouterr().err


def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch):
    """As of a pod of Kubernetes, at its start."""
    found, tries = socket.getaddrinfo, []

    def resolve(host, *rest, **more):
        tries.append(host)
        if host == "pod-0.job" and len(tries) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with cluster._listen(("pod-0.job", 0), 20.0) as made:
        assert made.getsockname()[0] == "127.0.0.1"


def test_an_address_of_another_host_is_refused():
    words = "192.0.2.1:0: cannot listen .* it has to be an address of process 0's host"
    with pytest.raises(errors.NebulaError, match=words):
        cluster._listen(("192.0.2.1", 0), 1.0)


STRANGER = """
import contextlib, os, sys, jax
how = {"cluster_detection_method": "deactivate", "initialization_timeout": 2}
for where in sys.argv[1:]:
    if not os.fork():
        jax.distributed.initialize(where, 2, 1, **how)
        print("connected", flush=True)
        os._exit(0)
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
"""


@pytest.mark.slow
def test_no_stranger_with_stock_jax_reaches_a_running_cluster_and_a_signal_stops_it(
    tmp_path,
):
    """Once, a `connect` as process 1 at JAX's port ended both processes."""
    where = f"127.0.0.1:{ports.free_port()}"
    started = ranked.Started(tmp_path, {}, {}, coordinator=where, steps=MANY)
    started.wait_for_step(3)
    open_to_anybody = {
        number: listening(each.pid) for number, each in enumerate(started.processes)
    }
    host, port = where.split(":")
    assert (host, int(port)) in open_to_anybody[0]
    for number, found in open_to_anybody.items():
        # The door, the proxy of this process alone, and the devices' collectives.
        assert len(found) <= 3 - number
    addresses = [
        f"{host}:{port}"
        for (host, port) in {(host, int(port))}
        | {each for found in open_to_anybody.values() for each in found}
    ]
    strangers = subprocess.run(
        [sys.executable, "-c", STRANGER, *addresses],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        timeout=60,
    )
    assert b"connected" not in strangers.stdout
    assert strangers.returncode == 0
    step = int(started.printed(1)[-1].split()[1])
    started.wait_for_step(step + 3)
    assert_stops(started, 1)


def listening(pid):
    """The addresses at which a process listens, by TCP over IPv4 and IPv6."""
    inodes = set()
    for each in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(each)[8:-1])
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{kind}").read_text().splitlines():
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                host, port = local.split(":")
                packed = b"".join(
                    bytes.fromhex(host)[at : at + 4][::-1]
                    for at in range(0, len(host) // 2, 4)
                )
                found.add((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


@needs_ipv6
def test_a_port_that_is_taken_is_named_as_it_was_given():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        words = re.escape(f"coordinator=[::1]:{port}: cannot listen on [::1]:{port}: ")
        with pytest.raises(errors.NebulaError, match=words):
            cluster._listen(("::1", port), 1.0)


def train_alone():
    return 17


def test_a_cluster_of_one_process_needs_no_others():
    assert cluster.run(cluster.Settings(), {}, train_alone) == 17
    settings = cluster.Settings("127.0.0.1:1", num_processes=1, process_id=0)
    assert cluster.run(settings, {}, train_alone) == 17


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (cluster.Settings("h:1"), "coordinator needs num_processes and"),
        (cluster.Settings("h:1", 2, 2), "num_processes=2 process_id=2"),
        (cluster.Settings("h", 2, 1), "coordinator=h: expected HOST:PORT"),
        (cluster.Settings("auto"), "coordinator=auto: JAX finds no Slurm step"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        cluster.run(settings, {}, train_alone)


def test_a_script_that_has_computed_already_is_told_so():
    jax.devices()
    settings = cluster.Settings(
        coordinator="127.0.0.1:1", num_processes=2, process_id=0
    )
    with pytest.raises(errors.SettingsError, match=r"before the processes .* meet"):
        cluster.run(settings, {}, train_alone)


@pytest.mark.parametrize("name", cluster.TASKS)
def test_one_of_several_tasks_does_not_train_alone(monkeypatch, name):
    monkeypatch.setenv(name, "4")
    with pytest.raises(errors.SettingsError, match=f"{name}=4 .* coordinator=auto"):
        cluster.run(cluster.Settings(), {}, train_alone)


def test_what_slurm_has_set_is_found(monkeypatch):
    for name, value in (
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_NODELIST", "node[07-09]"),
        ("SLURM_NTASKS", "3"),
        ("SLURM_PROCID", "2"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_NUM_NODES", "3"),
    ):
        monkeypatch.setenv(name, value)
    found = cluster._place_of(cluster.Settings("auto"))
    assert found.address[0] == "node07"
    assert (found.processes, found.rank, found.device_ids) == (3, 2, [0])
