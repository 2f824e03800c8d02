"""A trainer and the switch of its lab: how it reaches trainers of other labs.

The switch gets an address to connect to, or a wish whom to reach, and carries bytes.
Whom it has reached the trainer finds out itself: by TLS through the switches, with a
certificate of its lab that no switch has the key of, and by what both sides exchange
inside it (`wire.sealing`). It makes that key itself, and replaces it in time; the
switch carries the request, as it carries newer revocation lists, which are signed.
"""

import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from nebula_jax import errors, printable
from nebula_jax.communication import bridge
from nebula_jax.communication.wire import greeting, json_lines, sealing, states
from nebula_jax.federation import inner, trainer_keys
from nebula_jax.security import incarnations, names, policy, private_files, seal
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import between_labs

RETRY_SECONDS = 0.2  # between attempts to reach a switch that was stopped
ANSWER_SECONDS = 15.0  # the switch waits for the other one for 10
RECORD_SECONDS = 60.0  # a switch that was stopped may take to come back


PLACE = "the other side of this lab's switch"
FRESH_SECONDS = 30.0  # between looks at certificate and revocation list


class PeerRefused(errors.NebulaError):
    """A trainer of another lab that must not take part."""


def record(folder: site_folder.Folder, kind: str, what: Mapping[str, Any]) -> None:
    """Puts an entry into the lab's log; raises NebulaError or OSError if it cannot."""
    inner.ask(folder, ANSWER_SECONDS, "record", kind=kind, what=what)


class Recorder:
    """The entries of a trainer in its lab's audit log, made beside the training."""

    def __init__(
        self,
        folder: site_folder.Folder | None,
        job: str,
        cluster: str,
        log: Callable[[str], None] = print,
    ) -> None:
        """Records nothing yet, and without a `folder` nothing at all; see `Trainer`.

        `log` is called with a line about each entry that was given up.
        """
        self._folder, self._log = folder, log
        self._about = {"job": job, "cluster": cluster}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "audit")

    def record(self, kind: str, **what: Any) -> None:
        """Puts an entry on its way."""
        if self._folder is not None:
            self._thread.submit(self._send, self._folder, kind, self._about | what)

    def saved(self, step: int, digest: str) -> None:
        """Records that a checkpoint is on the disk; the peers cosign the log then."""
        self.record("checkpoint", event="saved", step=step, digest=digest)

    def close(self) -> None:
        """Waits until all entries are in the log, or have been given up."""
        self._thread.shutdown()

    def _send(
        self, folder: site_folder.Folder, kind: str, what: Mapping[str, Any]
    ) -> None:
        deadline = time.monotonic() + RECORD_SECONDS
        while True:
            try:
                record(folder, kind, what)
                return
            except (errors.NebulaError, OSError) as error:
                if time.monotonic() > deadline or isinstance(error, inner.Refused):
                    self._log(f"{kind} is not in the audit log: {error}")
                    return
            time.sleep(RETRY_SECONDS)


class Trainer:
    """A trainer of a lab: this process."""

    def __init__(
        self,
        folder: site_folder.Folder,
        job: str,
        cluster: str,
        lab: str,
        log: Callable[[str], None] = print,
    ) -> None:
        """Begins its next incarnation.

        Its peers may be of `lab` alone (empty for any). `log` is called with a line
        about the lab of each peer, and if the switch goes. Raises errors.NebulaError if
        it has no credentials, or runs already.
        """
        self.folder, self.job, self.cluster = folder, job, cluster
        self._lab, self._log = lab, log
        self.on_gone: Callable[[str, str, bool], None] = lambda owner, why, may: None
        """Is called with the DNS name of lost peers, why, and if they may come back."""
        self._met: set[str] = set()
        private_files.keep_out_of_core_dumps()
        trainer_keys.prepare(folder)
        self._numbers = incarnations.Incarnations(folder.epochs, job, cluster)
        self._admitting = threading.Lock()  # of several links, each with a thread
        self._is_closed = threading.Event()
        self._serving: socket.socket | None = None
        threading.Thread(target=self._stay_fresh, daemon=True, name="keys").start()

    def _stay_fresh(self) -> None:
        while not self._is_closed.wait(FRESH_SECONDS):
            with contextlib.suppress(errors.NebulaError, OSError):
                trainer_keys.refresh(self.folder)

    def close(self) -> None:
        """Takes no more peers."""
        self._is_closed.set()
        if self._serving is not None:
            with contextlib.suppress(OSError):
                self._serving.shutdown(socket.SHUT_RDWR)
        self._numbers.close()

    def client_context(self) -> Any:
        """Returns the TLS context of one connection to another trainer."""
        return between_labs.client_context(self.folder, "trainer")

    def server_context(self) -> Any:
        """Returns the TLS context of one connection from another trainer."""
        return between_labs.server_context(self.folder, "trainer")

    def reach(self, listener: str) -> bridge.Route:
        """Returns the way to a listening trainer, through the switches."""

        def reach(seconds: float) -> tuple[socket.socket, str]:
            try:
                seconds = max(seconds, ANSWER_SECONDS)
                fields = {"to": listener, "lab": self._lab}
                sock, answer = self._request("dial", seconds, **fields)
            except (inner.Absent, inner.NoSwitch) as error:
                raise ConnectionError(str(error)) from None
            except inner.Lost as error:
                raise bridge.PeerLost(str(error)) from None
            except inner.Refused as error:
                raise bridge.ConnectError(str(error)) from None
            return sock, site_folder.trainer_name(str(answer["lab"]))

        return reach

    def finish(self, role: states.Role) -> greeting.Finish:
        """Returns the steps from TLS to sealed frames, with a check of the peer."""

        def offer() -> seal.Offer:
            return seal.offer(self._numbers.own, self.cluster, self.job)

        return sealing.finish(role, offer, self._admit)

    def _admit(self, offer: seal.Offer, certificate: bytes) -> None:
        """Raises errors.NebulaError unless a peer may take part."""
        peer = between_labs.check_peer(certificate, self.folder, "trainer")
        name = f"{printable.line(offer.cluster)} of {peer.lab}"
        if not names.is_cluster(offer.cluster):
            raise PeerRefused(f"{name}: that is no cluster's name")
        if peer.role != "trainer" or offer.job != self.job:
            job = printable.line(offer.job)
            raise PeerRefused(f"{name} ({peer.role}) takes part in job {job}")
        if self._lab and peer.lab != self._lab:
            raise PeerRefused(f"{name} is not of {self._lab} (peer)")
        rules = policy.load(self.folder.path / policy.FILE)
        rules.check_lab(self.job, offer.cluster, peer.lab)
        with self._admitting:
            self._numbers.admit(name, offer.incarnation)
            if name not in self._met:
                self._met.add(name)
                self._log(f"{printable.line(offer.cluster)} is at {peer.lab}")

    def serve(self, port: int, is_shared: bool = False) -> None:
        """Lets others reach this process, on an inner `port`, until it is closed.

        With `is_shared` other accounts of this lab may too, though the job is this
        one's. Raises errors.NebulaError if the switch does not run, or refuses.
        """

        def request() -> socket.socket:
            fields = {"port": port, "shared": is_shared, "lab": self._lab}
            serving: socket.socket = self._request("serve", ANSWER_SECONDS, **fields)[0]
            return serving

        self._serving = request()
        threading.Thread(
            target=self._keep_serving, args=(request,), daemon=True, name="switch"
        ).start()

    def _keep_serving(self, request: Callable[[], socket.socket]) -> None:
        while not self._is_closed.is_set():
            sock = self._serving
            assert sock is not None  # `serve` has made one
            with contextlib.suppress(OSError, EOFError, json_lines.Malformed):
                sock.settimeout(None)
                while True:
                    self._take(json_lines.read(sock))  # until its end
            sock.close()
            if self._is_closed.is_set():
                return
            self._log("the switch of this lab has gone; waiting for it to come back")
            while not self._is_closed.wait(RETRY_SECONDS):
                try:
                    self._serving = request()
                except (errors.NebulaError, OSError):
                    continue
                self._log("the switch of this lab is back")
                break

    def _take(self, news: Mapping[str, Any]) -> None:
        """Takes from the switch that trainers of a lab, or all, are gone, and why."""
        lab, why = str(news.get("gone", "")), printable.line(str(news.get("why", "")))
        self._log(why)
        owner = site_folder.trainer_name(lab) if lab else ""
        self.on_gone(owner, why, news.get("may_return") is True)

    def dialed_by(self, cluster: str, lab: str) -> set[str]:
        """Returns the accounts that have dialed this process as a cluster of a lab.

        The switches say whose those are: `ana@lab-t`. Raises NebulaError without one.
        """
        about = {"job": self.job, "from": self.cluster, "to": cluster, "lab": lab}
        found = inner.ask(self.folder, ANSWER_SECONDS, "dialed", **about)
        return set(found["accounts"])

    def _request(self, op: str, seconds: float, **fields: Any) -> Any:
        about = {"job": self.job, "from": self.cluster}
        return inner.request(self.folder, seconds, op, **about, **fields)
