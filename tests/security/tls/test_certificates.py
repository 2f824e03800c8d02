import datetime
import ssl
import stat

import pytest
from cryptography import x509
from two_contexts import shake_hands

from nebula_jax.security import tls
from nebula_jax.security.tls import certificates, credentials


@pytest.fixture
def folder(tmp_path):
    certificates.issue_for_run(tmp_path, ["discriminator", "generator:0"])
    return tmp_path


def read(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_certificate_has_its_clusters_name_and_no_other(folder):
    certificate = read(folder / "generator-0" / "cert.pem")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert list(names.value) == [x509.DNSName("generator-0")]


def test_a_certificate_is_signed_by_the_one_authority_of_the_run(folder):
    authority = read(folder / "discriminator" / "ca.pem")
    assert authority == read(folder / "generator-0" / "ca.pem")
    for name in ("discriminator", "generator-0"):
        read(folder / name / "cert.pem").verify_directly_issued_by(authority)


def test_certificates_are_valid_for_a_year_even_where_clocks_are_slow(folder):
    for name in ("ca.pem", "cert.pem"):
        certificate = read(folder / "discriminator" / name)
        now = datetime.datetime.now(datetime.UTC)
        early = now - certificate.not_valid_before_utc
        late = certificate.not_valid_after_utc - now
        minute = datetime.timedelta(minutes=1)
        assert abs(early - datetime.timedelta(days=1)) < minute
        assert abs(late - datetime.timedelta(days=365)) < minute


def test_the_authoritys_key_is_not_kept(folder):
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pem"))
    assert files == [
        f"{cluster}/{name}.pem"
        for cluster in ("discriminator", "generator-0")
        for name in ("ca", "cert", "key")
    ]


def test_folders_and_keys_are_for_the_user_alone(folder):
    own = folder / "generator-0"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert stat.S_IMODE((own / "key.pem").stat().st_mode) == 0o600


def test_a_certificate_of_another_authority_is_refused(folder, tmp_path):
    other = tmp_path / "another run"
    certificates.issue_for_run(other, ["discriminator", "generator:0"])
    mine = (
        tls.server_contexts(folder / "discriminator"),
        tls.client_contexts(folder / "generator-0"),
    )
    theirs = (
        tls.server_contexts(other / "discriminator"),
        tls.client_contexts(other / "generator-0"),
    )
    shake_hands(theirs[0](), theirs[1]())
    for server, client in ((mine[0], theirs[1]), (theirs[0], mine[1])):
        with pytest.raises(
            ssl.SSLCertVerificationError, match="self-signed certificate in"
        ):
            shake_hands(server(), client())


def test_an_expired_certificate_is_refused(tmp_path, monkeypatch):
    """By OpenSSL, when a peer shows it; `credentials` refuses one's own."""
    monkeypatch.setattr(certificates, "LIFETIME", datetime.timedelta(hours=-1))
    certificates.issue_for_run(tmp_path, ["discriminator", "generator:0"])
    monkeypatch.setattr(
        credentials, "check", lambda folder, cluster: credentials.files(folder)
    )
    server = tls.server_contexts(tmp_path / "discriminator")()
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(server, tls.client_contexts(tmp_path / "generator-0")())


@pytest.mark.parametrize(
    ("name", "may"),
    [("ca", {"key_cert_sign", "crl_sign"}), ("cert", {"digital_signature"})],
)
def test_a_key_may_do_what_it_is_for_and_nothing_else(folder, name, may):
    extensions = read(folder / "discriminator" / f"{name}.pem").extensions
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    all_of_them = {
        *("digital_signature", "content_commitment", "key_encipherment"),
        *("data_encipherment", "key_agreement", "key_cert_sign", "crl_sign"),
    }
    assert {each for each in all_of_them if getattr(usage.value, each)} == may
    assert usage.critical
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value.ca == (name == "ca")


def test_a_certificates_purposes_and_name_must_be_understood(folder):
    extensions = read(folder / "discriminator" / "cert.pem").extensions
    for each in (x509.ExtendedKeyUsage, x509.SubjectAlternativeName):
        assert extensions.get_extension_for_class(each).critical
