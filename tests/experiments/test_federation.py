"""Two labs from nothing to trained models: the commands of SECURITY.md."""

import concurrent.futures
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time

import ports
import psutil
import pytest
import tiny_runs
import tiny_translations

SECONDS = 60
RUN = {"steps": 5, "checkpoint_every": 5}  # programs of test_pretrain_m3


ADDRESSES = "10.78.0.1", "10.78.0.2"


def ip(*arguments):
    """Runs `ip`; raises if this machine or user cannot."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def networks():
    """Yields what runs a command in each lab's own network, and the first's address.

    Two namespaces with nothing but a line between them; where only root may make them,
    and this is not root, both labs are in this machine's network.
    """
    names = [f"nebula-{os.getpid()}-{lab}" for lab in "st"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ends = [f"nb{os.getpid()}{lab}" for lab in "st"]
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(names, ends, ADDRESSES, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            yield ((), ()), "127.0.0.1"
            return
        yield [("ip", "netns", "exec", name) for name in names], ADDRESSES[0]


class Lab:
    """A lab in a folder of its own, in which `nebula` is typed."""

    def __init__(self, path, prefix):
        path.mkdir()
        self.path, self.folder, self.prefix = path, path / "federation", prefix
        self.secrets = []
        self._environment = os.environ | {"PYTHONPATH": tiny_runs.QUICK_PATH}

    def start(self, *arguments):
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "scripts.nebula", *arguments],
            cwd=self.path,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def nebula(self, *arguments, given="", fails=False):
        """Types a command; returns what it printed."""
        process = self.start(*arguments)
        output, _ = process.communicate(given, timeout=SECONDS)
        assert bool(process.returncode) == fails, output
        return output


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    """Two labs whose switches run, from nothing within a minute."""
    with networks() as (prefixes, host):
        yield from connected(tmp_path_factory.mktemp("labs"), prefixes, host)


def connected(path, prefixes, host):
    began = time.monotonic()
    s, t = Lab(path / "s", prefixes[0]), Lab(path / "t", prefixes[1])
    where = f"{host}:{ports.free_port()}"
    assert "has founded a federation" in s.nebula("init", "--name", "lab-s")
    ca = s.path / "ca"  # where the authority may be another user's
    ca.mkdir(mode=0o700)
    shutil.copy(s.folder / "federation.json", ca)
    (s.folder / "authority").rename(ca / "authority")
    own = f"--federation={ca}"
    invitation = s.nebula("invite", "lab-t", "--address", where, own)
    command = [sys.executable, "-m", "scripts.nebula", "authority", own]
    users = ("--socket", s.path / "users.sock", "--authority", shlex.join(command))
    switches = [s.start("switch", "--listen", where, *users)]
    try:
        assert "the switch of lab-s runs" in switches[0].stdout.readline()
        assert (s.path / "users.sock").is_socket()
        joined = t.nebula("join", where, "--name", "lab-t", given=invitation)
        assert "has joined the federation" in joined
        switches.append(t.start("switch", "--peer", f"lab-s={where}"))
        assert "the switch of lab-t runs" in switches[1].stdout.readline()
        while "line to lab-t" not in s.nebula("status"):
            assert time.monotonic() < began + SECONDS
        assert time.monotonic() < began + SECONDS  # from nothing to a secure line
        for each in switches:  # which have keys
            limit = psutil.Process(each.pid).rlimit(psutil.RLIMIT_CORE)
            assert limit == (1, 1)  # which a program that takes dumps minds too
        s.secrets.append(invitation.strip())
        told = (x.folder / "inside" / "switch.json" for x in (s, t))
        s.secrets += [json.loads(each.read_text())["token"] for each in told]
        yield s, t
    finally:
        for each in switches:
            each.terminate()
        for each in switches:
            output, _ = each.communicate(timeout=SECONDS)
            assert each.returncode == 0, output
            assert not any(secret in output for secret in s.secrets)


def begin(runs, lab, **flags):
    """Starts a cluster of a run in a lab's network."""
    runs.prefix = lab.prefix
    started = runs.start(federation=lab.folder, **flags)
    runs.prefix = ()
    return started


@pytest.fixture(scope="module")
def translations(tmp_path_factory):
    return tiny_translations.Translations(tmp_path_factory.mktemp("abnet"))


def outputs_of(started):
    """Waits for processes; their outputs, once all have ended well."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda each: each.communicate(timeout=200)[0], started))
    assert not any(each.returncode for each in started), "\n".join(found)
    return found


def command_lines():
    """What `ps` shows of every process of this machine."""
    lines = []
    for each in psutil.process_iter():
        try:
            lines.append(" ".join(each.cmdline()))
        except psutil.Error:
            continue
    return "\n".join(lines)


def test_pretrain_m3_over_two_switches_ends_with_the_parameters_of_one_without(
    labs, runs
):
    """Each generator has the text of its own languages, the discriminator has none."""
    s, t = labs
    output = runs.finished(workdir="plain", cluster="whole", **RUN)
    common = RUN | {"workdir": "federated"}
    common["vocabulary"] = runs.flag("plain", "vocabulary")
    started = [begin(runs, t, cluster="discriminator", data_dir="none", **common)]
    for number, languages in enumerate((["en", "de"], ["sw"])):
        own = {"cluster": f"generator:{number}", "data_dir": f"text{number}"}
        runs.write_part(own["data_dir"], languages)
        started.append(begin(runs, s, **own, **common))
    time.sleep(1.0)
    shown = command_lines()
    assert "pretrain_m3" in shown
    assert not any(secret in shown for secret in s.secrets)
    for output in outputs_of(started):
        assert not any(secret in output for secret in s.secrets)
    clusters = ("discriminator", "generator-0", "generator-1")
    runs.assert_same("federated", "plain", clusters, 5)
    summary = (runs.folder / "federated" / "discriminator" / "summary.json").read_text()
    whose = {each: "trainer.lab-s" for each in ("generator:0", "generator:1")}
    assert json.loads(summary)["certificates_of_peers"] == whose


@pytest.mark.slow  # M3's is in every run of the tests
def test_train_abnet_over_two_switches(labs, translations):
    s, t = labs
    more = {"workdir": "plain", "steps": 4, "checkpoint_every": 4, "eval_every": 4}
    translations.finished(**more)
    sides = {
        name: next((translations.folder / "prepared").rglob(f"{name}"))
        for name in ("source", "target")
    }
    common = more | {"workdir": "federated"}
    started = [
        begin(translations, t, cluster="target", side_dir=sides["target"], **common),
        begin(translations, s, cluster="source", side_dir=sides["source"], **common),
    ]
    outputs_of(started)
    translations.assert_same("federated", "plain", ("source", "target"), 4)


def test_both_logs_have_what_happened_and_verify(labs):
    s, t = labs
    for lab in labs:
        assert "line to lab-" in lab.nebula("status")
        assert "the switch and the trainers are new" in lab.nebula("rotate")
        lab.nebula("audit", "verify")
        story = lab.nebula("audit", "show")
        assert not any(secret in story for secret in s.secrets)
        for words in ("job began (", "checkpoint saved (", "kind tokens"):
            assert words in story, story
    copy = str(s.folder / "audit")
    verified = t.nebula("audit", "verify", "--folder", copy)
    assert "entries of lab-s witnessed here" in verified
