"""Two labs of a federation on this machine: folders, running switches, trainers."""

import asyncio
import contextlib
import dataclasses
import datetime
import threading
import time

import lab_folders
from cryptography.hazmat.primitives import serialization

from nebula_jax.communication import endpoints
from nebula_jax.federation import joining, outside, server
from nebula_jax.runtime import connect
from nebula_jax.security import accounts
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.membership import authority, invitations, member, site_folder

SECONDS = 20.0
outside.HANDSHAKE_SECONDS = 60.0  # who joins does not try twice; a machine may pause


def issuer_in_this_process(folder):
    """The authority of a lab, without a process of its own."""
    made = authority.LocalAuthority(folder)

    async def ask(fields):
        return await asyncio.to_thread(joining.answer, fields, made)

    return ask


class Running:
    """A switch that runs in a thread."""

    def __init__(
        self, folder, listens=False, peers=(), port=0, issuer=None, users=None, end=None
    ):
        self.folder, self.lines, self._end = folder, [], end
        if issuer is None and folder.authority.exists():
            issuer = issuer_in_this_process(folder)
        self.switch = server.Switch(folder, self.lines.append, issuer)
        self.switch.socket = users
        self.outside = endpoints.listen(("127.0.0.1", port)) if listens else None
        self.address = self.outside and self.outside.getsockname()[:2]
        self.peer = self.switch.state.lab, self.address  # for who dials it
        self._peers, self._started = list(peers), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(SECONDS), self.lines

    def _run(self):
        inside = endpoints.listen(("127.0.0.1", 0))

        async def run():
            await self.switch.run(self.outside, self._peers, inside, self._note)
            if self._end is not None:
                await self._end()

        asyncio.run(run())

    def _note(self):
        self.loop = asyncio.get_running_loop()
        self._started.set()

    def call(self, function, *args):
        """Calls a function in the switch's thread; returns its result."""

        async def called():
            return function(*args)

        return self.run(called())

    def run(self, work):
        """Runs a coroutine in the switch's thread; returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)

    def wait_for_line(self, lab):
        wait_until(lambda: lab in self.switch.state.lines)

    def restart(self, at):
        """Starts the switch anew, which dials that of another lab."""
        self.stop()
        self.__init__(self.folder, peers=[at.peer])
        self.wait_for_line(at.switch.state.lab)

    def stop(self):
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.switch.stop)
            self._thread.join(SECONDS)
            assert not self._thread.is_alive()


def wait_until(predicate, seconds=SECONDS):
    """Waits until something holds; fails if it does not."""
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def found(path, name="lab-s"):
    """A lab that has founded a federation."""
    folder = site_folder.Folder(path)
    joining.found(folder, name)
    accounts.Accounts.begin(path)
    return folder


def join(path, at, address, name="lab-t"):
    """A lab that has joined the federation of `at`, whose switch runs at an address."""
    issuer = authority.LocalAuthority(at)
    text = issuer.invite(name, f"{address[0]}:{address[1]}")
    folder = site_folder.Folder(path)
    joining.join(folder, invitations.parse(text))
    accounts.Accounts.begin(path)
    return folder


def entries(state):
    """The entries of a switch's audit log."""
    state.audit.commit()
    return list(audit_entries.read(state.folder.audit))


PAST = datetime.timedelta(days=7)


def expire(folder, issuer):
    """Replaces the certificates of a lab with others, of a week ago."""
    past, name = site_folder.utc_now() - PAST, folder.load().name
    key = (issuer._folder.audit / "key.pem").read_bytes()
    log, ca = serialization.load_pem_private_key(key, None), issuer.certificate()
    for role in site_folder.ROLES:
        key, csr = member.new_request()
        pem = lab_folders.at(past, lab_folders.certify, issuer, csr, name, role, log)
        lab_folders.at(past, member.install, folder, role, key, pem, ca)


@dataclasses.dataclass
class Labs:
    """Two labs, connected."""

    s: Running
    t: Running


@contextlib.contextmanager
def two_labs(path):
    """Yields Labs; lab-s has the authority, and lab-t dials."""
    first = found(path / "s")
    with contextlib.ExitStack() as stack:
        s = Running(first, listens=True, users=path / "users.sock")
        stack.callback(s.stop)
        folder = join(path / "t", first, s.address)
        t = Running(folder, peers=[s.peer], users=path / "users-t.sock")
        stack.callback(t.stop)
        t.wait_for_line("lab-s")
        s.wait_for_line("lab-t")
        yield Labs(s, t)


def settings(lab, **more):
    """How a trainer of a lab meets others."""
    base = {"federation": str(lab.folder.path), "job": "m3", "connect_timeout": 20.0}
    return connect.Settings(**base | more)
