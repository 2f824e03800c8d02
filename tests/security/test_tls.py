import ssl
import stat

import pytest

from nebula_jax import errors
from nebula_jax.security import tls


@pytest.fixture
def folder(tmp_path):
    tls.issue_for_run(tmp_path, ["discriminator", "generator:0"])
    return tmp_path


def shake_hands(server_context, client_context, name="discriminator"):
    """A handshake in memory; the client's SSLObject."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    open_ends = [client, server]
    for _ in range(10):
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not open_ends
    return client


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


def test_keys_are_for_the_user_alone(folder):
    mode = (folder / "generator-0" / "key.pem").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_unusable_credentials_are_named(folder, damage):
    key = folder / "generator-0" / "key.pem"
    key.unlink() if damage == "missing" else key.write_text("no key")
    with pytest.raises(errors.NebulaError, match=r"needs ca\.pem"):
        tls.client_contexts(folder / "generator-0")()


def test_certificate_names():
    assert tls.certificate_name("generator:3") == "generator-3"
