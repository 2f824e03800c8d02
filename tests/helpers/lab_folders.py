"""Two labs of a federation as folders: lab-s has the authority, lab-t has joined."""

import atexit
import functools
import pathlib
import shutil
import tempfile
from typing import NamedTuple
from unittest import mock

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax.security import audit, private_files
from nebula_jax.security.membership import (
    authority,
    invitations,
    member,
    revocation,
    site_folder,
)
from nebula_jax.security.tls import certificates

LOG = ed25519.Ed25519PrivateKey.generate()
"""The key of the log that the authorities here name."""
ADDRESS = "lab-s.example:7070"


def at(now, call, *given, **more):
    """What a call returns while the clock of this machine stands at a time."""
    with mock.patch.object(site_folder, "utc_now", return_value=now):
        return call(*given, **more)


class Labs(NamedTuple):
    """The authority, and the folders of lab-s and lab-t."""

    authority: authority.LocalAuthority
    s: site_folder.Folder
    t: site_folder.Folder


def create(path, lab="lab-s"):
    """An authority, in the folder of a lab."""
    folder, key = site_folder.Folder(path), LOG.public_key().public_bytes_raw()
    folder.prepare()
    log_key = certificates.pem(LOG).decode()
    private_files.write(audit.paths(folder.audit).key, log_key)
    made = authority.LocalAuthority.create(folder, lab, key)
    folder.create(lab, fingerprint=made.fingerprint)
    return made


def certify(issuer, csr, lab, role, log=LOG):
    """A certificate (PEM) with a receipt of the log, whose key is given."""
    pem = issuer.certify(csr, lab, role)
    facts = certificates.facts(x509.load_pem_x509_certificate(pem))
    return issuer.attach(pem, log.sign(facts))


def renew(issuer, folder, role):
    """Installs a new certificate for a role; the certificate."""
    key, csr = member.new_request()
    pem = certify(issuer, csr, folder.load().name, role)
    return member.install(folder, role, key, pem, issuer.certificate())


def period(now):
    """Begin and end of a list that is signed now."""
    return now - member.BACKDATED, now + authority.LIST_LIFETIME


def redeem(issuer, secret, lab):
    """Uses an invitation up, by its secret."""
    issuer.redeem(invitations.claim(secret, lab, []), lab, [])


def join(issuer, path, lab, address=ADDRESS):
    """The folder of a lab with credentials of both roles and the revocation list."""
    folder = site_folder.Folder(path)
    if lab != issuer.lab:
        issuer.admit(lab)
    folder.create(lab, address, issuer.fingerprint)
    for role in site_folder.ROLES:
        renew(issuer, folder, role)
        revocation.RevocationList(folder, role).accept(issuer.revocation_list()[1])
    return folder


def make(path):
    """Both labs, in folders s and t of a path."""
    issuer = create(path / "s")
    return Labs(
        issuer,
        join(issuer, path / "s", "lab-s", address=""),
        join(issuer, path / "t", "lab-t"),
    )


def copy(path):
    """Both labs as `make` has them, but with an authority that all copies share. It is
    faster: what is made is on the disk before it is used."""
    shutil.copytree(_template(), path, symlinks=True, dirs_exist_ok=True)
    s, t = (site_folder.Folder(path / name) for name in ("s", "t"))
    return Labs(authority.LocalAuthority(s), s, t)


@functools.cache
def _template():
    path = pathlib.Path(tempfile.mkdtemp(prefix="lab_folders_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    make(path)
    return path
