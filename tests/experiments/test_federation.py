"""Labs from nothing to trained models: the commands of the guides."""

import concurrent.futures
import contextlib
import json
import os
import re
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
TRANSLATION = tiny_translations.ALIKE | {"steps": 4, "checkpoint_every": 4}
MOST_COMMANDS = 8  # of a lab, from nothing to both scenarios


ADDRESSES = "10.78.0.1", "10.78.0.2"


def ip(*arguments):
    """Runs `ip`; raises if this machine or user cannot."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def networks():
    """Yields what runs a command in each lab's own network, and the first's address:
    two namespaces joined by a line, or this machine's network where this user may make
    none."""
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
        self.secrets, self.commands = [], []
        self._environment = os.environ | {"PYTHONPATH": tiny_runs.QUICK_PATH}

    def start(self, *arguments):
        self.commands.append(arguments)
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


def end(process):
    """Stops a command that runs until then; its output."""
    process.terminate()
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
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
            output = end(each)
            assert not any(secret in output for secret in s.secrets)


def begin(runs, lab, **flags):
    """Starts a cluster of a run in a lab's network."""
    lab.commands.append(flags)
    runs.prefix = lab.prefix
    started = runs.start(federation=lab.folder, **flags)
    runs.prefix = ()
    return started


@pytest.fixture(scope="module")
def runs(runs):
    """With a run of one process, and the text of each generator in its folder."""
    runs.finished(workdir="plain", cluster="whole", **RUN)
    for number, languages in enumerate((["en", "de"], ["sw"])):
        runs.write_part(f"text{number}", languages)
    return runs


@pytest.fixture(scope="module")
def translations(tmp_path_factory):
    """With a run of one process."""
    made = tiny_translations.Translations(tmp_path_factory.mktemp("abnet"))
    made.finished(workdir="plain", **TRANSLATION)
    return made


def start_m3(runs, at, workdir, flags=()):
    """Starts each cluster of M3 at its Lab of `at`, with its own of `flags` besides or
    in place of its text; the discriminator has none."""
    common = RUN | {"vocabulary": runs.flag("plain", "vocabulary")}
    text = {"discriminator": "none", "generator:0": "text0", "generator:1": "text1"}
    return [
        begin(
            runs,
            lab,
            cluster=cluster,
            workdir=workdir,
            **common | {"data_dir": text[cluster]} | dict(flags).get(cluster, {}),
        )
        for cluster, lab in at.items()
    ]


def assert_as_in_one_process(runs, workdir):
    clusters = ("discriminator", "generator-0", "generator-1")
    runs.assert_same(workdir, "plain", clusters, RUN["steps"])


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


def commands_of_the_guide(**given):
    """The commands by which a lab offers text, with other words for some."""
    page = (tiny_runs.ROOT / "experiments" / "m3" / "README.md").read_text()
    found = re.findall("^    scripts/run nebula ((?:data|grant) .*)$", page, re.M)
    assert len(found) == 3
    for each in found:
        for old, new in given.items():
            each = each.replace(old, str(new))
        yield shlex.split(each.replace("2027-01-01", "2099-01-01"))


@contextlib.contextmanager
def offered(lab, text, vocabulary):
    """Offers a folder as corpus-es to the other lab's owner, as the guide has it."""
    given = {"FOLDER": text, "shared.model": vocabulary}
    given["128"] = tiny_runs.TINY["max_length"]
    *first, serve = commands_of_the_guide(**given)
    for each in first:
        lab.nebula(*each)
    serving = lab.start(*serve)
    while "serving corpus-es" not in (line := serving.stdout.readline()):
        assert line
    yield
    end(serving)


@pytest.mark.slow
def test_pretrain_m3_over_two_switches_ends_with_the_parameters_of_one_without(
    labs, runs
):
    """Each generator has the text of its own languages: one has it from lab-t."""
    s, t = labs
    vocabulary = runs.folder / runs.flag("plain", "vocabulary")
    flags = {"generator:1": {"data_dir": "none", "data": "handle:corpus-es"}}
    at = {"discriminator": t, "generator:0": s, "generator:1": s}
    with offered(t, runs.folder / "text1", vocabulary):
        started = start_m3(runs, at, "federated", flags)
        shown = ""
        while "--cluster=generator:1" not in shown:
            shown = command_lines()
        assert not any(secret in shown for secret in s.secrets)
        for output in outputs_of(started):
            assert not any(secret in output for secret in s.secrets)
    assert_as_in_one_process(runs, "federated")
    summary = (runs.folder / "federated" / "discriminator" / "summary.json").read_text()
    whose = {each: "trainer.lab-s" for each in ("generator:0", "generator:1")}
    assert json.loads(summary)["certificates_of_peers"] == whose
    assert "handle corpus-es" in t.nebula("audit", "show")


@contextlib.contextmanager
def founded(path, names):
    """Yields labs, each with its switch: one has founded, and the others joined."""
    first, *others = made = [Lab(path / name, ()) for name in names]
    where = [f"127.0.0.1:{ports.free_port()}" for _ in names]
    with contextlib.ExitStack() as stack:

        def switch(lab, *arguments):
            stack.callback(end, made := lab.start("switch", *arguments))
            assert f"the switch of {lab.path.name} runs" in made.stdout.readline()

        first.nebula("init", "--name", names[0])
        invite = ("invite", "--address", where[0])
        given = [first.nebula(*invite, name) for name in names[1:]]
        switch(first, "--listen", where[0])
        for number, lab in enumerate(others, 1):
            lab.nebula("join", where[0], "--name", names[number], given=given.pop(0))
            before = zip(names[:number], where, strict=False)
            peers = [f"--peer={name}={address}" for name, address in before]
            switch(lab, "--listen", where[number], *peers)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("names", [("lab-s", "lab-t"), ("lab-s", "lab-t", "lab-u")])
def test_both_scenarios_take_few_commands_from_nothing(
    tmp_path, runs, translations, names
):
    prepared = translations.folder / "prepared"
    workdir = f"with-{len(names)}"
    with founded(tmp_path, names) as made:
        s, t, u = (made[number % len(names)] for number in range(3))
        to_t = {"peer": "lab-t"}
        if u is not s:  # nobody else may be a generator
            rules = {"pretrain_m3": {"labs": {"generator": ["lab-s", "lab-u"]}}}
            (t.folder / "policy.json").write_text(json.dumps({"jobs": rules}))
            t.commands.append("policy.json")
        at = {"generator:0": s, "generator:1": u, "discriminator": t}
        flags = {"generator:0": to_t, "generator:1": to_t}
        outputs_of(start_m3(runs, at, workdir, flags))
        to_u = {"peer": names[made.index(u)]}
        sides = {"source": (u, to_t), "target": (t, to_u)}
        outputs_of(
            begin(
                translations,
                lab,
                cluster=name,
                side_dir=next(prepared.rglob(name)),
                workdir=workdir,
                **TRANSLATION | peer,
            )
            for name, (lab, peer) in sides.items()
        )
    assert_as_in_one_process(runs, workdir)
    translations.assert_same(workdir, "plain", sides, TRANSLATION["steps"])
    assert max(len(each.commands) for each in made) <= MOST_COMMANDS


@pytest.mark.slow
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
