"""scripts/wan_netns.sh: its words everywhere, the line itself where it can be made."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "wan_netns.sh"
CAN_DO = (
    "ip link add name a type veth peer name b"
    " && tc qdisc add dev a root tbf rate 1mbit burst 32kb latency 50ms"
)
ENDS_SOON = 20.0  # seconds; a hundredth of that is usual

# Sends 1 MB through the line and prints the seconds it took.
SENDER = """
import os, socket, sys, time
while True:
    try:
        line = socket.create_connection((os.environ["WAN_A"], 7070), timeout=5)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
start = time.monotonic()
line.sendall(bytes(1_000_000))
assert line.recv(1) == b"x"
print(line.getsockname()[0], os.environ["WAN_B"], time.monotonic() - start)
"""
RECEIVER = """
import os, socket
line, _ = socket.create_server((os.environ["WAN_A"], 7070)).accept()
received = 0
while received < 1_000_000:
    received += len(line.recv(1 << 16))
line.sendall(b"x")
"""


def run(*arguments, **options):
    return subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, **options
    )


@pytest.fixture(scope="module")
def _namespaces():
    """Skips where the kernel, the tools or the user cannot do it."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "tc", "unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    unshare = ["unshare", "--net", "--pid", "--fork", "--mount-proc"]
    probe = subprocess.run([*unshare, "sh", "-c", CAN_DO], capture_output=True)
    if probe.returncode != 0:
        pytest.skip(f"no shaped namespaces here: {probe.stderr.decode().strip()}")


needs_namespaces = pytest.mark.usefixtures("_namespaces")


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--help",
        "60mbit",
        "60mbit true -- true",
        "60mbit -- true",
        "60mbit -- true --",
        "60mbit -- -- true",
    ],
)
def test_wrong_usage_shows_the_right_one(arguments):
    done = run(*arguments.split())
    assert done.returncode == 2
    assert done.stderr.startswith("usage: scripts/wan_netns.sh RATE -- CMD_A... --")


@pytest.mark.parametrize("rate", ["60", "mbit", "60mbits", "-1mbit", "0.0mbit", "x; y"])
def test_a_rate_that_cannot_be_read_is_named(rate):
    done = run(rate, "--", "true", "--", "true")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"RATE is '{rate}'; write such as 60mbit" in line


@pytest.mark.parametrize(
    ("missing", "package"), [("tc", "iproute2"), ("nsenter", "util-linux")]
)
def test_a_missing_tool_is_named(tmp_path, missing, package):
    for tool in {"ip", "tc", "unshare", "nsenter", "setpriv"} - {missing}:
        (tmp_path / tool).symlink_to("/bin/true")
    done = subprocess.run(
        [shutil.which("bash"), SCRIPT, "60mbit", "--", "true", "--", "true"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{missing} is missing (on Debian: apt install {package})" in line


def test_who_is_not_root_is_told(tmp_path):
    for tool in ("ip", "tc", "unshare", "nsenter", "setpriv"):
        (tmp_path / tool).symlink_to("/bin/true")
    nobody = {"user": 65534} if os.geteuid() == 0 else {}
    done = subprocess.run(
        [shutil.which("bash"), "-s", "--", "60mbit", "--", "true", "--", "true"],
        input=SCRIPT.read_text(),  # another user might not be able to open the file
        cwd="/",
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        **nobody,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "scripts/wan_netns.sh: only root can make network namespaces\n"
    )


@needs_namespaces
def test_two_commands_talk_at_the_given_rate():
    python = [sys.executable, "-S", "-c"]
    done = run("20mbit", "--", *python, RECEIVER, "--", *python, SENDER)
    assert (done.returncode, done.stderr) == (0, "")
    source, other, seconds = done.stdout.split()
    assert source == other == "10.77.0.2"
    # 8 Mbit of payload at 20 Mbit/s, of which headers take 4 %; no faster is possible.
    # The upper limit is for a busy machine.
    assert 0.38 < float(seconds) < ENDS_SOON


@needs_namespaces
@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ("true", "true", 0),
        ("exit 3", "sleep 60", 3),
        ("sleep 60", "exit 4", 4),
        ("true", "sleep 0.2; exit 5", 5),
        ("sleep 60; exit 6", "sleep 0.1; exit 7", 7),
        ("trap 'exit 8' TERM; sleep 0.5", "exit 9", 9),
    ],
)
def test_the_status_is_that_of_the_first_to_fail_and_the_other_is_ended(a, b, status):
    start = time.monotonic()
    done = run("none", "--", "sh", "-c", a, "--", "sh", "-c", b)
    assert (done.returncode, done.stderr) == (status, "")
    assert time.monotonic() - start < ENDS_SOON


@needs_namespaces
def test_a_command_that_does_not_exist_is_named():
    done = run("none", "--", "no-such-command", "--", "sleep", "60")
    assert done.returncode == 127
    assert done.stderr == (
        "scripts/wan_netns.sh: there is no command no-such-command\n"
    )


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_it_is_ended(number):
    marker = f"wan_netns_test_{uuid.uuid4().hex}"
    # A grandchild that has its own session and listens to no signal but the last.
    stubborn = f"trap '' TERM INT HUP; sleep 60; : {marker}"
    command = f'setsid sh -c "{stubborn}" & echo up; sleep 60; : {marker}'
    script = subprocess.Popen(
        [
            # What a script starts in its background is deaf to Ctrl-C from the start.
            "env",
            "--default-signal=INT",
            "bash",
            SCRIPT,
            "60mbit",
            "--",
            "sh",
            "-c",
            command,
            "--",
            "sh",
            "-c",
            command,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert [script.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    everyone = processes()
    ours = {process for process, about in everyone.items() if marker in about[0]}
    networks = {everyone[process][1] for process in ours} - {everyone[os.getpid()][1]}
    assert len(ours) >= 4
    assert len(networks) == 2
    script.send_signal(number)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert script.wait(ENDS_SOON) == expected
    deadline = time.monotonic() + ENDS_SOON
    while left := [
        about
        for about in processes().values()
        if marker in about[0] or about[1] in networks
    ]:
        # A network without a process has no line either: the kernel removes both.
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@needs_namespaces
def test_being_told_to_end_before_both_sides_have_begun_is_not_forgotten(tmp_path):
    """Process 1 of a namespace is not even sent what it does not listen to."""
    shim = tmp_path / "ip"
    shim.write_text(f'#!/bin/sh\nkill -TERM 1\nexec {shutil.which("ip")} "$@"\n')
    shim.chmod(0o755)
    script = subprocess.Popen(
        ["bash", SCRIPT, "60mbit", "--", "sleep", "60", "--", "sleep", "60"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    try:
        assert script.wait(5 * ENDS_SOON) != 0
    finally:
        script.kill()


def processes():
    """Process id -> (command line, network namespace)."""
    found = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text(errors="replace")
            network = (process / "ns" / "net").readlink()
        except OSError:  # it has just ended
            continue
        found[int(process.name)] = (command, network)
    return found
