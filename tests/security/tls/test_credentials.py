"""Credentials that must not be used: one line that names the file, at the start."""

import datetime
import os
import pathlib
import re

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from two_contexts import shake_hands

from nebula_jax.security import tls
from nebula_jax.security.tls import certificates, credentials

CLUSTERS = ["discriminator", "generator:0"]
DAY = datetime.timedelta(days=1)


@pytest.fixture
def folder(tmp_path):
    certificates.issue_for_run(tmp_path, CLUSTERS)
    return tmp_path / "generator-0"


def refused(folder, words, cluster=None):
    """Asserts that no context is made of the folder, in either role."""
    for contexts in (tls.server_contexts, tls.client_contexts):
        with pytest.raises(credentials.CredentialsError, match=re.escape(words)) as why:
            contexts(folder, cluster)
        assert "\n" not in str(why.value)


def issued(folder, monkeypatch, begin, end, usages=credentials.USAGES, ca_end=None):
    """Credentials of generator:0 with another period and usage."""
    now = datetime.datetime.now(datetime.UTC)
    monkeypatch.setattr(certificates, "CLOCK_DIFFERENCE", DAY)
    monkeypatch.setattr(certificates, "LIFETIME", ca_end or 365 * DAY)
    authority = certificates.new_authority()
    monkeypatch.setattr(certificates, "LIFETIME", end - now)
    monkeypatch.setattr(certificates, "CLOCK_DIFFERENCE", now - begin)
    monkeypatch.setattr(certificates, "USAGES", usages)
    name = x509.DNSName("generator-0")
    certificates.write(folder, certificates.issue(authority, name))
    return folder


def utc(year):
    return datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)


def test_credentials_that_serve(folder):
    assert credentials.check(folder, "generator:0").key == folder / "key.pem"
    credentials.check(folder)


def test_a_certificate_of_a_thousand_years_for_signing_code(tmp_path, monkeypatch):
    usages = [ExtendedKeyUsageOID.CODE_SIGNING]
    both = issued(tmp_path / "both", monkeypatch, utc(2000), utc(3000), usages)
    words = "cert.pem: the certificate is valid for 365243 days, from 2000-01-01 to"
    refused(both, words)
    soon = datetime.datetime.now(datetime.UTC) + 30 * DAY
    signing = issued(tmp_path / "signing", monkeypatch, soon - 40 * DAY, soon, usages)
    refused(signing, "its extended key usage is codeSigning, and must have serverAuth")


@pytest.mark.parametrize("usage", credentials.USAGES, ids=lambda usage: usage._name)
def test_a_certificate_for_one_end_only(tmp_path, monkeypatch, usage):
    now = datetime.datetime.now(datetime.UTC)
    issued(tmp_path, monkeypatch, now - DAY, now + DAY, [usage])
    refused(tmp_path, f"its extended key usage is {usage._name}, and must have")


def test_periods(tmp_path, monkeypatch):
    now = datetime.datetime.now(datetime.UTC)
    late = issued(tmp_path / "late", monkeypatch, now - 9 * DAY, now - 2 * DAY)
    refused(late, f"cert.pem: the certificate expired on {now - 2 * DAY:%Y-%m-%d}")
    early = issued(tmp_path / "early", monkeypatch, now + 2 * DAY, now + 9 * DAY)
    refused(early, "cert.pem: the certificate is not valid before")
    old = tmp_path / "old"
    issued(old, monkeypatch, now - DAY, now + DAY, ca_end=-DAY / 2)
    refused(old, "ca.pem: the authority expired on")


def test_a_certificate_of_another_cluster(folder):
    words = "cert.pem: the certificate is for generator-0, not for generator-1"
    refused(folder, words, "generator:1")


def test_a_key_of_another_certificate(folder):
    other = folder.parent / "discriminator" / "key.pem"
    (folder / "key.pem").write_bytes(other.read_bytes())
    refused(folder, "key.pem: the key of another certificate")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_read_or_change(folder, mode):
    key = folder / "key.pem"
    key.chmod(mode)
    refused(folder, f"(mode {mode:04o}): chmod 600 {key}")
    key.chmod(0o400)
    credentials.check(folder)


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"-----BEGIN X-----\n\xff"])
def test_files_that_are_missing_or_damaged(folder, name, content):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    refused(folder, f"tls={folder}: needs ca.pem, cert.pem and key.pem")


def test_a_key_with_a_password(folder):
    path = folder / "key.pem"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    refused(folder, "needs ca.pem, cert.pem and key.pem: Password was not given")


@pytest.mark.parametrize("junk", [b"", b"junk"])
def test_a_peer_without_a_certificate_is_no_peer(junk):
    with pytest.raises(credentials.CredentialsError, match="the peer's"):
        credentials.check_peer(junk)


def test_credentials_in_memory_serve_again_and_again(folder):
    contents = [(folder / f"{name}.pem").read_bytes() for name in ("ca", "cert", "key")]
    descriptors = [credentials.in_memory(each) for each in contents]
    where = pathlib.Path("fd:" + ",".join(map(str, descriptors)))
    make = tls.client_contexts(where, "generator:0")
    server = tls.server_contexts(folder.parent / "discriminator")
    for _ in range(2):
        shake_hands(server(), make())
    for each in descriptors:
        os.close(each)
    refused(where, f"tls={where}: needs ca.pem, cert.pem and key.pem")
