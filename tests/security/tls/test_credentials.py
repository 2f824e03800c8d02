"""The credentials of the clusters of a run: what is made, and what must not be used.

What a peer is refused for is the matrix of `test_bad_certificates`: contexts and checks
are those of a federation.
"""

import datetime
import os
import pathlib
import re
import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from lab_folders import at
from two_contexts import shake_hands

from nebula_jax.security import private_files, tls
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import certificates, credentials

CLUSTERS = ["discriminator", "generator:0"]
DAY = datetime.timedelta(days=1)


@pytest.fixture
def folder(tmp_path):
    certificates.issue_for_run(tmp_path, CLUSTERS)
    return tmp_path / "generator-0"


def read(folder):
    return credentials.parse((folder / credentials.FILE).read_bytes())


def refused(folder, words, cluster=None):
    """Asserts that no context is made of the folder, in either role."""
    for contexts in (tls.server_contexts, tls.client_contexts):
        with pytest.raises(credentials.CredentialsError, match=re.escape(words)) as why:
            contexts(folder, cluster)
        assert "\n" not in str(why.value)


def issued(folder, monkeypatch, begin, end, usages=credentials.USAGES, ca_end=None):
    """Credentials of generator:0 with another period and usage."""
    now, key = site_folder.utc_now(), ec.generate_private_key(ec.SECP256R1())
    signer = certificates.authority(now - DAY, now + (ca_end or 365 * DAY))
    with monkeypatch.context() as other:
        other.setattr(credentials, "USAGES", usages)
        owner = x509.DNSName("generator-0")
        made = certificates.leaf(signer, key.public_key(), owner, begin, end)
    folder.mkdir(exist_ok=True)
    pem = certificates.pem(key, made, signer.certificate)
    (folder / credentials.FILE).write_bytes(pem)
    (folder / credentials.FILE).chmod(0o600)
    return folder


def utc(year):
    return datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)


# What is made.


def test_each_cluster_has_its_name_of_the_one_authority_for_90_days(folder):
    found = {
        name: read(folder.parent / name) for name in ("discriminator", folder.name)
    }
    assert len({each.authority for each in found.values()}) == 1
    for name, each in found.items():
        assert credentials.names_of(each.certificate) == [name]
        each.certificate.verify_directly_issued_by(each.authority)
        for made in (each.certificate, each.authority):  # also where clocks are slow
            begin, end = made.not_valid_before_utc, made.not_valid_after_utc
            minute, now = datetime.timedelta(minutes=1), site_folder.utc_now()
            assert abs(now - begin - DAY) < minute
            assert abs(end - now - 90 * DAY) < minute


def test_the_authoritys_key_is_not_kept_and_others_are_for_the_user_alone(folder):
    files = sorted(folder.parent.rglob("*.*"))
    assert files == [
        folder.parent / name / credentials.FILE
        for name in ("discriminator", "generator-0")
    ]
    for path in files:
        assert path.read_bytes().count(b"PRIVATE KEY-----\n") == 2  # begin and end
        assert (
            read(path.parent).authority.public_key()
            != read(path.parent).key.public_key()
        )
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_may_do_what_it_is_for_and_nothing_else(folder):
    own = read(folder)
    signs, shakes_hands = {"key_cert_sign", "crl_sign"}, {"digital_signature"}
    for made, may in ((own.authority, signs), (own.certificate, shakes_hands)):
        usage = made.extensions.get_extension_for_class(x509.KeyUsage)
        uses = {
            *("digital_signature", "content_commitment", "key_encipherment"),
            *("data_encipherment", "key_agreement", "key_cert_sign", "crl_sign"),
        }
        assert {each for each in uses if getattr(usage.value, each)} == may
        constraints = made.extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.value.ca == (may is signs)
        assert usage.critical
        assert constraints.critical
    for kind in (x509.ExtendedKeyUsage, x509.SubjectAlternativeName):
        assert own.certificate.extensions.get_extension_for_class(kind).critical


# What is used.


def test_both_sides_show_certificates_and_speak_tls_1_3(folder):
    server = tls.server_contexts(folder.parent / "discriminator", "discriminator")
    client = tls.client_contexts(folder, "generator:0")
    assert shake_hands(server(), client()).version() == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(server(), client(), name="generator-1")
    assert server() is not server()  # so no session is resumed
    for context in (server(), client()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED


def test_a_certificate_of_another_authority_is_refused(folder, tmp_path):
    other = tmp_path / "another run"
    certificates.issue_for_run(other, CLUSTERS)
    for server, client in ((folder.parent, other), (other, folder.parent)):
        context = tls.server_contexts(server / "discriminator")()
        with pytest.raises(ssl.SSLCertVerificationError, match="self-signed"):
            shake_hands(context, tls.client_contexts(client / "generator-0")())


def test_credentials_in_memory_serve_again_and_again(folder):
    descriptor = credentials.in_memory((folder / credentials.FILE).read_bytes())
    where = pathlib.Path(f"fd:{descriptor}")
    make = tls.client_contexts(where, "generator:0")
    server = tls.server_contexts(folder.parent / "discriminator")
    for _ in range(2):
        shake_hands(server(), make())
    os.close(descriptor)
    refused(where, f"tls={where}: needs cluster.pem")


# What must not be: one line that names the file, at the start.


def test_a_certificate_of_a_thousand_years_for_signing_code(tmp_path, monkeypatch):
    usages = [ExtendedKeyUsageOID.CODE_SIGNING]
    long = issued(tmp_path / "long", monkeypatch, utc(2000), utc(3000))
    words = "cluster.pem: the certificate is valid for 365243 days, from 2000-01-01 to"
    refused(long, words)
    soon = site_folder.utc_now() + 30 * DAY
    signing = issued(tmp_path / "signing", monkeypatch, soon - 40 * DAY, soon, usages)
    refused(signing, "its extended key usage is codeSigning, and must have serverAuth")


def test_periods(tmp_path, monkeypatch):
    now = site_folder.utc_now()
    late = issued(tmp_path / "late", monkeypatch, now - 9 * DAY, now - 2 * DAY)
    refused(late, f"cluster.pem: the certificate expired on {now - 2 * DAY:%Y-%m-%d}")
    early = issued(tmp_path / "early", monkeypatch, now + 2 * DAY, now + 9 * DAY)
    refused(early, "cluster.pem: the certificate is not valid before")
    old = tmp_path / "old"
    issued(old, monkeypatch, now - DAY, now + DAY, ca_end=-DAY / 2)
    refused(old, "cluster.pem: the certificate's authority expired on")
    made = issued(tmp_path / "made", monkeypatch, now - DAY, now + DAY)
    make = tls.client_contexts(made)
    with pytest.raises(credentials.CredentialsError, match="expired"):
        at(now + 2 * DAY, make)


def test_a_certificate_of_another_cluster(folder):
    words = "cluster.pem: the certificate is for generator-0, not for generator-1"
    refused(folder, words, "generator:1")


def test_a_key_of_another_certificate_and_another_authority(folder):
    path, own, other = (
        folder / credentials.FILE,
        read(folder),
        read(folder.parent / "discriminator"),
    )
    path.write_bytes(certificates.pem(other.key, own.certificate, own.authority))
    refused(folder, "cluster.pem: the certificate is for another key")
    now = site_folder.utc_now()
    unknown = certificates.authority(now - DAY, now + DAY).certificate
    path.write_bytes(certificates.pem(own.key, own.certificate, unknown))
    refused(folder, "cluster.pem: the certificate was not issued by the authority")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_read_or_change(folder, mode):
    path = folder / credentials.FILE
    path.chmod(mode)
    words = re.escape(f"(mode {mode:04o}): chmod 600 {path}")
    for contexts in (tls.server_contexts, tls.client_contexts):
        with pytest.raises(private_files.PrivateFileError, match=words):
            contexts(folder)
    path.chmod(0o400)
    credentials.load(folder)


@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"-----BEGIN X-----\n\xff"])
def test_a_file_that_is_missing_or_damaged(folder, content):
    path = folder / credentials.FILE
    whole = path.read_bytes()
    path.unlink()
    for contents in (content, content and whole[:-40], content and whole[40:]):
        if contents is not None:
            path.write_bytes(contents)
            path.chmod(0o600)
        refused(folder, f"tls={folder}: needs cluster.pem")


def test_a_key_with_a_password(folder):
    path, own = folder / credentials.FILE, read(folder)
    locked = own.key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    path.write_bytes(locked + own.pem.partition(b"-----END PRIVATE KEY-----\n")[2])
    refused(
        folder,
        "needs cluster.pem as python -m scripts.issue_certificates makes it: Password",
    )


@pytest.mark.parametrize(("junk", "reason"), [(b"", "none"), (b"junk", "malformed")])
def test_a_peer_without_a_certificate_is_no_peer(junk, reason):
    with pytest.raises(credentials.CredentialsError, match="the peer") as error:
        credentials.check_peer(junk)
    assert error.value.reason == reason
