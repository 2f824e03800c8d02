"""The seconds until a lab is gone that was revoked at another; the line is full."""

import contextlib
import pathlib
import subprocess
import time
from collections.abc import Iterator

from nebula_jax.communication import endpoints
from nebula_jax.federation import inner
from nebula_jax.security.membership import authority, revocation, site_folder
from scripts.bench import harness, labs, relay

REVOCATIONS = 100
FLOOD_MBIT, FLOOD_KILOBYTES = 60, 1000
FULL_BYTES = 20e6  # that have crossed when trainers have met


def _sent(lab: labs.Lab) -> dict[str, int]:
    """Returns the bytes that a lab's switch has sent on each of its lines."""
    found = inner.ask(site_folder.Folder(lab.folder), 10.0, "status")
    return dict(found["sent"])


@contextlib.contextmanager
def flood(source: labs.Lab, target: labs.Lab) -> Iterator[None]:
    """Lets trainers of two labs send as much as their line takes, both ways."""
    more = {"kilobytes": FLOOD_KILOBYTES, "steps": 10**9, "compute": 0.0}
    with contextlib.ExitStack() as stack:
        for cluster, lab, peer in (
            ("target", target, "lab-s"),
            ("source", source, "lab-u"),
        ):
            reach = {"federation": str(lab.folder), "job": "flood", "peer": peer}
            given = {"reach": reach, "cluster": cluster} | more
            stack.enter_context(trainer := subprocess.Popen(labs.trainer(given)))
            stack.callback(trainer.kill)
        deadline = time.monotonic() + labs.SECONDS
        while not any(each > FULL_BYTES for each in _sent(source).values()):
            if time.monotonic() > deadline:
                raise RuntimeError("the trainers have not filled the line")
            time.sleep(0.1)
        yield


def measure(folder: pathlib.Path) -> list[float]:
    """Revokes lab-t at lab-s; returns the seconds until lab-u is rid of it, each time.

    All that lab-u learns comes over its line to lab-s, which is full.
    """
    found = []
    where, outside = (f"127.0.0.1:{harness.free_port()}" for _ in range(2))
    line = relay.Relay(endpoints.host_and_port("peer", where), FLOOD_MBIT * 1e6 / 8)
    with (
        labs.lab_in(folder / "s") as s,
        contextlib.closing(line),
        labs.lab_in(folder / "u") as u,
    ):
        s.nebula("init", "--name", "lab-s")
        s.start("--listen", where)
        invitation = s.nebula("invite", "lab-u", "--address", where)
        u.nebula("join", where, "--name", "lab-u", given=invitation)
        relayed = f"lab-s={endpoints.written(line.address)}"
        u.start("--listen", outside, "--peer", relayed)
        issuer = authority.LocalAuthority(site_folder.Folder(s.folder))
        revoked = revocation.RevocationList(site_folder.Folder(s.folder))
        with flood(s, u):
            for number in range(REVOCATIONS):
                with labs.lab_in(folder / f"t{number}") as t:
                    invitation = issuer.invite("lab-t", where)
                    t.nebula("join", where, "--name", "lab-t", given=invitation)
                    t.start("--peer", f"lab-u={outside}")
                    while "lab-t" not in _sent(u):
                        time.sleep(0.05)
                    issuer.revoke("lab-t")
                    began = time.monotonic()
                    revoked.accept(issuer.revocation_list()[1])
                    while "lab-t" in _sent(u):
                        time.sleep(0.01)
                    found.append(time.monotonic() - began)
    return found
