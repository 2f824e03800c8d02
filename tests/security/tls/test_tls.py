import ssl

import pytest
from two_contexts import shake_hands

from nebula_jax.security import tls
from nebula_jax.security.tls import certificates, credentials


@pytest.fixture
def folder(tmp_path):
    certificates.issue_for_run(tmp_path, ["discriminator", "generator:0"])
    return tmp_path


def test_both_sides_show_certificates_and_speak_tls_1_3(folder):
    server = tls.server_contexts(folder / "discriminator")()
    client = shake_hands(server, tls.client_contexts(folder / "generator-0")())
    assert client.version() == "TLSv1.3"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls_1_1_is_refused(folder):
    server = tls.server_contexts(folder / "discriminator")()
    old = tls.client_contexts(folder / "generator-0")()
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        shake_hands(server, old)


def test_a_client_without_a_certificate_is_refused(folder):
    server = tls.server_contexts(folder / "discriminator")()
    anonymous = ssl.create_default_context(cafile=folder / "discriminator" / "ca.pem")
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake_hands(server, anonymous)


def test_a_server_of_another_name_is_refused(folder):
    server = tls.server_contexts(folder / "discriminator")()
    client = tls.client_contexts(folder / "generator-0")()
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(server, client, name="generator-1")


def test_contexts_are_fresh_so_that_no_session_is_resumed(folder):
    make = tls.server_contexts(folder / "discriminator")
    assert make() is not make()
    assert make().num_tickets == 0


def test_nothing_is_renegotiated_or_compressed(folder):
    for make in (
        tls.server_contexts(folder / "discriminator"),
        tls.client_contexts(folder / "generator-0"),
    ):
        options = make().options
        assert options & ssl.OP_NO_RENEGOTIATION
        assert options & ssl.OP_NO_COMPRESSION


def test_files_that_go_away_after_they_were_checked_are_named(folder, monkeypatch):
    own = folder / "generator-0"
    check = credentials.check

    def lost(*args):
        files = check(*args)
        (own / "ca.pem").unlink()
        return files

    make = tls.client_contexts(own)
    monkeypatch.setattr(credentials, "check", lost)
    with pytest.raises(credentials.CredentialsError, match="OpenSSL does not take"):
        make()
