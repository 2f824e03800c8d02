"""The bad-certificate matrix over real sockets: inputs 58 to 77 of the reference.

What counts is the server's own reason. In TLS 1.3 the handshake of a client that is
refused succeeds: it notices when it reads first, which is asserted as well.
"""

import concurrent.futures
import contextlib
import datetime
import pathlib
import socket
import ssl
import threading
import time
from typing import NamedTuple

import lab_folders
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from nebula_jax import errors
from nebula_jax.security import tls
from nebula_jax.security.membership import member, revocation, site_folder
from nebula_jax.security.tls import between_labs, certificates, credentials

HOUR = datetime.timedelta(hours=1)
DAY = 24 * HOUR
PEM = serialization.Encoding.PEM
PATIENCE = 20.0  # seconds that a test waits for what should come at once
DEADLINE = 0.15  # seconds for the handshake of a client that stalls
WELCOME = b"welcome"
IN_HANDSHAKE, AT_FIRST_READ = "refused in the handshake", "refused at the first read"
CLIENT_SIDE, SERVER_SIDE = (
    ExtendedKeyUsageOID.CLIENT_AUTH,
    ExtendedKeyUsageOID.SERVER_AUTH,
)


# A server, and clients. Each connection has its own two sockets and its own context.


def serve_once(make_context, sock, folder, deadline=PATIENCE):
    """Serves one connection as a switch would; the reason for its audit log."""
    sock.settimeout(deadline)
    try:
        with (
            sock,
            make_context().wrap_socket(
                sock, server_side=True, suppress_ragged_eofs=False
            ) as line,
        ):
            line.settimeout(PATIENCE)
            between_labs.check_peer(line.getpeercert(True), folder)
            line.sendall(WELCOME)
            return "served" if line.recv(1) else "closed"
    except Exception as error:  # each has to have a reason
        return between_labs.reason_of(error)


def two_ends():
    """Two connected TCP sockets: the server's and the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), PATIENCE)
        server, _ = listener.accept()
    return server, client


def meet(make_context, client, folder, **options):
    """The server's reason, and what the client returns, called with its socket."""
    server_end, client_end = two_ends()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, client_end:
        served = pool.submit(serve_once, make_context, server_end, folder, **options)
        noticed = client(client_end)
        client_end.close()
        return served.result(PATIENCE), noticed


def visitor(context, name="lab-s", sessions=None):
    """A client that reads what it is greeted with."""

    def visit(sock):
        try:
            line = context.wrap_socket(
                sock, server_hostname=name, suppress_ragged_eofs=False
            )
        except OSError:
            return IN_HANDSHAKE
        with line:
            try:
                if line.recv(len(WELCOME)) != WELCOME:
                    return AT_FIRST_READ
            except OSError:
                return AT_FIRST_READ
            if sessions is not None:
                sessions.append(line.session)
            line.sendall(b".")
            return "welcome"

    return visit


# Certificates that no authority of ours would issue.


class Pki(NamedTuple):
    """The labs, the authority that signs for them, and a folder for files."""

    labs: lab_folders.Labs
    signer: certificates.Authority
    scratch: pathlib.Path

    def server(self, **options):
        return lambda: between_labs.server_context(self.labs.s, **options)

    def client(self, chain=(), key=None):
        """A client that shows any chain, and sends what a careful one would not."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.load_verify_locations(cadata=self.labs.authority.certificate().decode())
        if chain:
            context.load_cert_chain(self.file(chain, key))
        return context

    def file(self, chain, key):
        """The path of a chain and its key."""
        path = self.scratch / f"{chain[0].serial_number}.pem"
        made = certificates.pem(key, *chain, self.signer.certificate)
        path.write_bytes(made)
        return path


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Labs of which no test of this module revokes anything."""
    return new_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def own_pki(tmp_path):
    """Labs of one test, which may revoke."""
    return new_pki(tmp_path)


def new_pki(path):
    labs = lab_folders.copy(path)
    (path / "scratch").mkdir()
    return Pki(labs, labs.authority._keys().signer, path / "scratch")


def strong_key():
    return ec.generate_private_key(ec.SECP256R1())


def dns(*names):
    return [x509.DNSName(name) for name in names]


def der_of(labs, role="switch"):
    """The certificate of lab-t."""
    return member.load(labs.t, role).certificate.public_bytes(tls.DER)


LAB_T, NOBODY = dns("lab-t"), "nobody"


def certificate(
    signer,
    key,
    names=LAB_T,
    begin=-HOUR,
    end=HOUR,
    usages=credentials.USAGES,
    is_authority=False,
    identifier=None,
    subject=None,
    receipt=lab_folders.LOG.sign,
):
    """A certificate with everything at will. identifier: whose key is named as the
    issuer's: by default the signer's; NOBODY: none. receipt: makes one of its facts."""
    now = site_folder.utc_now()
    subject = subject or certificates.name("lab")
    builder = certificates._builder(
        subject, signer.certificate.subject, key.public_key(), now + begin, now + end
    )
    extensions = [
        x509.BasicConstraints(ca=is_authority, path_length=None),
        x509.KeyUsage(True, *4 * [False], *2 * [is_authority], *2 * [False]),
        *([x509.ExtendedKeyUsage(usages)] if usages else []),
        *([x509.SubjectAlternativeName(names)] if names else []),
    ]
    for each in extensions:
        builder = builder.add_extension(each, critical=True)
    if identifier is not NOBODY:
        own = certificates.identifier_of(identifier or signer)
        builder = builder.add_extension(own, critical=False)
    made = builder.sign(signer.key, hashes.SHA256())
    value = receipt(certificates.facts(made))
    return certificates.with_receipt(signer, made, value) if value else made


def self_signed(pki):
    key = strong_key()
    named = certificate(pki.signer, key)  # whose subject is the issuer of the next
    found = certificate(certificates.Authority(named, key), key, identifier=NOBODY)
    assert found.subject == found.issuer
    return [found], key


def another_authority(pki):
    """An authority that has the name of the right one, and another key."""
    key, name = strong_key(), pki.signer.certificate.subject
    now = site_folder.utc_now()
    found = (
        certificates._builder(name, name, key.public_key(), now - HOUR, now + DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .add_extension(certificates.key_usage(signs_certificates=True), True)
        .sign(key, hashes.SHA256())
    )
    return certificates.Authority(found, key)


def of_another_authority(names_right_key=False, shows_it=False):
    def make(pki):
        signer, key = another_authority(pki), strong_key()
        identifier = pki.signer if names_right_key else None
        made = certificate(signer, key, identifier=identifier)
        return [made, *([signer.certificate] if shows_it else [])], key

    return make


def leaf(key=None, **options):
    """A certificate of the right authority."""

    def make(pki):
        own = key or strong_key()
        return [certificate(pki.signer, own, **options)], own

    return make


def issued_by_a_lab(is_authority):
    """A certificate in lab-t's name that another lab has issued."""

    def make(pki):
        lab_key, key = strong_key(), strong_key()
        of_lab = certificate(
            pki.signer,
            lab_key,
            dns("lab-u"),
            is_authority=is_authority,
            subject=certificates.name("lab", "lab-u"),
        )
        return [certificate(certificates.Authority(of_lab, lab_key), key), of_lab], key

    return make


def signed_with_sha1(pki):
    """A right certificate but for its signature, which no builder makes any more."""
    key = strong_key()
    ours = certificate(pki.signer, key)
    sha256 = bytes.fromhex("300a06082a8648ce3d040302")
    sha1 = bytes.fromhex("300906072a8648ce3d0401")
    assert ours.tbs_certificate_bytes[:2] == b"\x30\x82"
    tbs = sequence(ours.tbs_certificate_bytes[4:].replace(sha256, sha1, 1))
    signature = pki.signer.key.sign(tbs, ec.ECDSA(hashes.SHA1()))
    bits = bytes([0x03, len(signature) + 1, 0]) + signature
    found = x509.load_der_x509_certificate(sequence(tbs + sha1 + bits))
    assert isinstance(found.signature_hash_algorithm, hashes.SHA1)
    return [found], key


def sequence(body):
    """The DER of a long sequence."""
    return b"\x30\x82" + len(body).to_bytes(2) + body


RSA_1024, RSA_2048 = (rsa.generate_private_key(65537, bits) for bits in (1024, 2048))
COMMON_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lab-t")])
MAKERS = {  # reason -> case -> maker
    "none": {"60 none": lambda pki: ([], None)},
    "self_signed": {"61 self-signed": self_signed},
    "unknown_authority": {
        "62 same name": of_another_authority(),
        "62 same name, shown": of_another_authority(shows_it=True),
        "62 same name and key id": of_another_authority(names_right_key=True),
    },
    "expired": {
        "63 expired": leaf(begin=-2 * HOUR, end=-HOUR),
        "63 expired now": leaf(end=-HOUR / 3600),
    },
    "not_yet_valid": {"64 not yet valid": leaf(begin=HOUR, end=2 * HOUR)},
    "wrong_name": {
        "65 two names": leaf(names=dns("lab-t", "lab-u")),
        "65 two kinds": leaf(names=[*LAB_T, x509.RFC822Name("a@lab-t")]),
        "65 wildcard": leaf(names=dns("*")),
        "65 no name": leaf(names=()),
        "65 common name only": leaf(names=(), subject=COMMON_NAME),
    },
    "wrong_usage": {
        "66 a server's": leaf(usages=[SERVER_SIDE]),
        "66 a client's": leaf(usages=[CLIENT_SIDE]),
        "66 code signing": leaf(usages=[ExtendedKeyUsageOID.CODE_SIGNING]),
        "66 for anything": leaf(usages=None),
    },
    "leaf_as_authority": {
        "67 of a lab": issued_by_a_lab(False),
        "67 of a lab with CA:TRUE": issued_by_a_lab(True),
    },
    "authority_as_leaf": {"67 CA:TRUE": leaf(is_authority=True)},
    "weak_key": {
        "68 RSA-1024": leaf(key=RSA_1024),
        "68 RSA-2048": leaf(key=RSA_2048),
        "P-384": leaf(key=ec.generate_private_key(ec.SECP384R1())),
        "Ed25519": leaf(key=ed25519.Ed25519PrivateKey.generate()),
    },
    "weak_digest": {"68 SHA-1": signed_with_sha1},
    "malformed": {"no issuer's key id": leaf(identifier=NOBODY)},
    "too_long": {"a year": leaf(end=365 * DAY)},
    "unlogged": {
        "not logged": leaf(receipt=lambda facts: b""),
        "of another log": leaf(receipt=ed25519.Ed25519PrivateKey.generate().sign),
        "another's receipt": leaf(
            receipt=lambda facts: lab_folders.LOG.sign(facts + b" ")
        ),
    },
}
OF_OTHERS = {  # who dials lab-t wants nobody else
    "65 another lab's": leaf(names=dns("lab-u")),
    "65 its trainer's": leaf(names=dns("trainer.lab-t")),
}


def cases(makers):
    return [
        pytest.param(make, reason, id=name)
        for reason, by_name in makers.items()
        for name, make in by_name.items()
    ]


@pytest.mark.parametrize(("make", "reason"), cases(MAKERS))
def test_a_bad_certificate_is_refused_for_what_it_is(pki, make, reason):
    found = meet(pki.server(), visitor(pki.client(*make(pki))), pki.labs.s)
    assert found == (reason, AT_FIRST_READ)


def refusal_of_server(pki, path):
    """Dials a server that shows a file of lab-t; returns why lab-s refuses it."""

    def serve(sock):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.load_cert_chain(path)
        sock.settimeout(PATIENCE)
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(sock, server_side=True) as line,
        ):
            line.recv(1)

    server_end, client_end = two_ends()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, client_end:
        served = pool.submit(serve, server_end)
        try:
            context = between_labs.client_context(pki.labs.s)
            with context.wrap_socket(client_end, server_hostname="lab-t") as line:
                between_labs.check_peer(line.getpeercert(True), pki.labs.s)
        except (OSError, site_folder.Refusal) as error:
            reason = between_labs.reason_of(error)
        served.result(PATIENCE)
    return reason


@pytest.mark.parametrize(
    ("make", "reason"),
    [*cases(MAKERS)[1:], *cases({"wrong_name": OF_OTHERS})],  # a server shows something
)
def test_a_server_with_a_bad_certificate_is_refused_by_a_client(pki, make, reason):
    """Either side checks the other alike."""
    assert refusal_of_server(pki, pki.file(*make(pki))) == reason


def test_a_peer_is_a_lab_and_a_role(pki):
    for role in site_folder.ROLES:
        peer = between_labs.check_peer(der_of(pki.labs, role), pki.labs.s)
        found = member.load(pki.labs.t, role).certificate
        life = found.not_valid_before_utc, found.not_valid_after_utc
        assert peer == ("lab-t", role, found.serial_number, *life)


@pytest.mark.parametrize(
    ("seconds", "reason"), [(-50, "served"), (50, "served"), (70, "not_yet_valid")]
)
def test_clocks_may_differ_by_a_minute(pki, seconds, reason):
    """Input 64: the authority's clock is ahead of the server's, or behind."""
    now = site_folder.utc_now() + datetime.timedelta(seconds=seconds)
    key, csr = member.new_request()
    issuer = pki.labs.authority
    pem = lab_folders.at(now, lab_folders.certify, issuer, csr, "lab-t", "switch")
    context = pki.client([x509.load_pem_x509_certificate(pem)], key)
    found, _ = meet(pki.server(), visitor(context), pki.labs.s)
    assert found == reason


# Versions, and what is no TLS.


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("newest", ["TLSv1", "TLSv1_1", "TLSv1_2"])
def test_an_old_version_is_refused(pki, newest):
    """Input 59; with it ciphers without forward secrecy or authentication."""
    context = pki.client(*leaf()(pki))
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion[newest]
    found = meet(pki.server(), visitor(context), pki.labs.s)
    assert found == ("tls_version", IN_HANDSHAKE)


@pytest.mark.parametrize(
    "data",
    [
        *(b"GET / HTTP/1.1\r\nHost: lab-s\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"),
        *(b"CONNECT lab-s:443 HTTP/1.1\r\n\r\n", bytes(64), b"NEBU" * 16),
    ],
)
def test_what_is_no_tls_is_called_plaintext(pki, data):
    """Input 58."""

    def send(sock):
        sock.sendall(data)
        with contextlib.suppress(ConnectionError):
            while received := sock.recv(100):
                assert WELCOME not in received

    assert meet(pki.server(), send, pki.labs.s) == ("plaintext", None)


# Revoked, and lists that do not serve.


def revoke(pki):
    """Revokes lab-t; lab-s, whose authority it is, has the new list."""
    pki.labs.authority.revoke("lab-t")


@pytest.mark.parametrize("role", site_folder.ROLES)
def test_labs_meet_until_one_is_revoked(own_pki, role):
    """Input 69."""
    labs, name = own_pki.labs, site_folder.dns_name("lab-s", role)
    server = own_pki.server(role=role)
    visit = lambda: visitor(between_labs.client_context(labs.t, role), name)  # noqa: E731
    assert meet(server, visit(), labs.s) == ("served", "welcome")
    revoke(own_pki)
    assert meet(server, visit(), labs.s) == ("revoked", AT_FIRST_READ)


def test_a_revoked_server_is_refused_by_a_client(own_pki):
    revoke(own_pki)
    path = own_pki.file(*_files(own_pki.labs.t))
    assert refusal_of_server(own_pki, path) == "revoked"


def test_a_live_connection_can_be_checked_again(own_pki):
    """Inputs 71 and 78: TLS does not look again; the switch does, by this."""
    labs = own_pki.labs
    der = der_of(labs)
    check = lambda: between_labs.check_peer(der, labs.s)  # noqa: E731
    check()
    now = site_folder.utc_now()
    for when, reason in ((121 * HOUR, "expired"), (-HOUR, "not_yet_valid")):
        with pytest.raises(credentials.CredentialsError, match="lab-t") as error:
            lab_folders.at(now + when, check)
        assert error.value.reason == reason
    revoke(own_pki)
    with pytest.raises(
        credentials.CredentialsError, match="lab-t was revoked"
    ) as error:
        check()
    assert error.value.reason == "revoked"
    labs.s.list_of("switch").write_text(list_of(own_pki, now - 8 * DAY, 9))
    with pytest.raises(revocation.ListRefused) as error:
        check()  # a connection ends with the list that admitted it
    assert error.value.reason == "revocation_list_expired"


def shows_session(own_pki, make_context):
    """Visits, and again after the lab was revoked with the session of the first visit;
    returns the server's two reasons, and if the session was resumed."""
    context = own_pki.client(*_files(own_pki.labs.t))
    sessions, resumed = [], []
    first, _ = meet(make_context, visitor(context, sessions=sessions), own_pki.labs.s)
    revoke(own_pki)
    (session,) = sessions

    def again(sock):
        with contextlib.suppress(OSError):
            line = context.wrap_socket(sock, server_hostname="lab-s", session=session)
            resumed.append(line.session_reused)
            line.recv(1)
            line.close()

    second, _ = meet(make_context, again, own_pki.labs.s)
    return first, second, any(resumed)


def _files(folder):
    """Chain and key of a lab's switch."""
    own = member.load(folder, "switch")
    return [own.certificate], own.key


def test_a_revoked_lab_does_not_come_back_with_its_session(own_pki):
    """Input 70."""
    found = shows_session(own_pki, own_pki.server())
    assert found == ("served", "revoked", False)


def test_it_would_with_a_context_that_lives_on(own_pki):
    """The trap that the test above is for: R1 of the reference."""
    context = own_pki.server()()
    context.num_tickets = 2
    found = shows_session(own_pki, lambda: context)
    assert found == ("served", "revoked", True)  # by `check_peer`: OpenSSL let it in


def list_of(pki, now, number, key=None):
    signer = pki.signer._replace(key=key or pki.signer.key)
    return revocation.sign(signer, number, {}, *lab_folders.period(now))


def rolled_back(pki):
    older = pki.labs.s.list_of("switch").read_text()
    revoke(pki)
    return older


BAD_LISTS = {
    "72 expired": lambda pki: list_of(pki, site_folder.utc_now() - 8 * DAY, 9),
    "73 forged": lambda pki: list_of(pki, site_folder.utc_now(), 9, strong_key()),
    "74 rolled_back": rolled_back,  # over a restart: the revoked lab would come in
    "missing": lambda pki: None,
}


@pytest.mark.parametrize("by", ["context", "peer"])
@pytest.mark.parametrize("name", BAD_LISTS)
def test_without_a_list_that_serves_nobody_is_served(own_pki, name, by):
    labs = own_pki.labs
    context = between_labs.client_context(labs.t)
    before = own_pki.server()()  # that of a connection under way
    made, path = BAD_LISTS[name](own_pki), labs.s.list_of("switch")
    if made is None:
        path.rename(labs.s.path / "gone")
    else:
        with contextlib.suppress(revocation.ListRefused):
            assert not revocation.RevocationList(labs.s).accept(made)
        path.write_text(made)
    server = own_pki.server() if by == "context" else lambda: before
    found, noticed = meet(server, visitor(context), labs.s)
    assert found == f"revocation_list_{name.rpartition(' ')[2]}"
    assert noticed == (AT_FIRST_READ if by == "peer" else IN_HANDSHAKE)


# A lab that joins.


def test_a_lab_joins_with_the_fingerprint_alone(pki):
    """It gets the certificate from anybody, and trusts it if the fingerprint fits."""
    labs = pki.labs
    anybody = between_labs.unverified_context()
    open_server = pki.server(allows_joining=True)
    ca, fingerprint = labs.authority.certificate(), labs.authority.fingerprint
    trusted = member.trusted_authority(ca, fingerprint)
    context, name = between_labs.joining_context(trusted)
    assert name == "lab-s"
    for server, client in (  # `check_peer` has the last word
        (open_server, visitor(anybody, "anything")),
        (open_server, visitor(context, name)),
        (pki.server(), visitor(context, name)),
    ):
        assert meet(server, client, labs.s) == ("none", AT_FIRST_READ)
    shows = visitor(pki.client(*self_signed(pki)))  # though it need not
    assert meet(open_server, shows, labs.s) == ("self_signed", AT_FIRST_READ)
    # Another lab is not taken for the authority's: it could use the invitation itself.
    server = Pki(labs._replace(s=labs.t), *pki[1:]).server(allows_joining=True)
    found = meet(server, visitor(context, name), labs.t)
    assert found == ("refused_by_peer", IN_HANDSHAKE)


def test_another_authority_is_not_joined(pki, tmp_path):
    """The last of input 75: a wrong fingerprint."""
    other = lab_folders.make(tmp_path).authority
    for ca in (
        other.certificate(),
        another_authority(pki).certificate.public_bytes(PEM),
    ):
        with pytest.raises(credentials.CredentialsError) as error:
            member.trusted_authority(ca, pki.labs.authority.fingerprint)
        assert error.value.reason == "unknown_authority"
    with pytest.raises(credentials.CredentialsError, match="no certificate"):
        member.trusted_authority(b"", pki.labs.authority.fingerprint)


# Handshakes that stop, and connections that are cut.


STAGES = ["nothing", "half-hello", "drops", "hello", "half-certificate"]


def stalling(context, stage, done):
    """A client that goes so far in the handshake and then waits for `done`."""

    def stall(sock):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(incoming, outgoing, server_hostname="lab-s")
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        hello = outgoing.read()
        if stage == "half-hello":
            sock.sendall(hello[: len(hello) // 2])
        elif stage == "drops":
            with contextlib.suppress(ConnectionError):  # closed at the deadline
                for byte in hello[:-1]:
                    if done.wait(0.02):
                        break
                    sock.sendall(bytes([byte]))
        elif stage != "nothing":
            sock.sendall(hello)
        if stage == "half-certificate":
            while not (flight := outgoing.read()):
                if not (data := sock.recv(1 << 14)):
                    return "closed"  # this thread had to wait until the deadline
                incoming.write(data)
                with contextlib.suppress(ssl.SSLWantReadError):
                    client.do_handshake()
            sock.sendall(flight[: len(flight) // 2])
        assert done.wait(PATIENCE)
        sock.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            while sock.recv(1 << 14):
                pass
        return "closed"

    return stall


@pytest.mark.parametrize("stage", STAGES)
def test_a_handshake_that_stalls_ends_at_the_deadline(pki, stage):
    """Input 76: at each flight of the client. The server closes the connection."""
    context = pki.client(*leaf()(pki))
    done = threading.Event()
    server_end, client_end = two_ends()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, client_end:
        client = pool.submit(stalling(context, stage, done), client_end)
        begin = time.monotonic()
        reason = serve_once(pki.server(), server_end, pki.labs.s, deadline=DEADLINE)
        seconds = time.monotonic() - begin
        done.set()
        assert client.result(PATIENCE) == "closed"
    assert reason == "stalled"
    assert DEADLINE <= seconds < DEADLINE + PATIENCE


@pytest.mark.parametrize("is_proper", [True, False])
def test_a_cut_connection_is_not_a_closed_one(pki, is_proper):
    """Input 77: without close_notify anybody on the line could have ended it."""
    context = between_labs.client_context(pki.labs.t)

    def leave(sock):
        line = context.wrap_socket(sock, server_hostname="lab-s")
        assert line.recv(len(WELCOME)) == WELCOME
        if is_proper:
            with contextlib.suppress(OSError):
                line.unwrap()
        line.close()

    found, _ = meet(pki.server(), leave, pki.labs.s)
    assert found == ("closed" if is_proper else "cut_off")


def test_a_client_that_goes_away_in_the_handshake_is_cut_off(pki):
    assert meet(pki.server(), lambda sock: None, pki.labs.s) == ("cut_off", None)


# The pieces on their own.


def refusal(pki, der):
    """Why lab-s refuses a certificate, without OpenSSL."""
    with pytest.raises(credentials.CredentialsError) as error:
        between_labs.check_peer(der, pki.labs.s)
    return error.value.reason


@pytest.mark.parametrize("name", ["65 two names", "65 no name", "68 SHA-1"])
def test_we_refuse_what_openssl_would_as_well(pki, name):
    (case,) = (each for each in cases(MAKERS) if each.id == name)
    make, reason = case.values
    (found,), _ = make(pki)
    assert refusal(pki, found.public_bytes(tls.DER)) == reason


@pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")
def test_no_flipped_bit_of_a_certificate_raises_anything_else(pki):
    """OpenSSL has refused such ones before; this is what a peer could reach."""
    der = der_of(pki.labs)
    reasons = set()
    for place in range(8 * len(der)):
        damaged = bytearray(der)
        damaged[place // 8] ^= 1 << place % 8
        try:
            between_labs.check_peer(bytes(damaged), pki.labs.s)
        except credentials.CredentialsError as error:
            reasons.add(error.reason)
    assert reasons >= {"malformed", "wrong_name", "wrong_usage"}


def unverified(code):
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = code
    return error


@pytest.mark.parametrize(("code", "asks"), [(9, True), (10, True), (18, False)])
def test_of_a_period_the_words_have_this_machines_time(code, asks):
    """A clock that is wrong makes each certificate too old, or too new."""
    words = between_labs.in_words(unverified(code))
    assert "certificate verify failed" in words
    assert (f"; here it is {site_folder.utc_now():%Y-%m-%d}" in words) == asks


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError("timed out"), "stalled"),
        (ConnectionResetError(), "cut_off"),
        (BrokenPipeError(), "cut_off"),
        (EOFError(), "cut_off"),
        (ssl.SSLEOFError(8, "EOF occurred"), "cut_off"),
        (ssl.SSLZeroReturnError(6, "closed"), "closed"),
        (ConnectionAbortedError("SSL handshake is taking longer than 5 s"), "stalled"),
        (credentials.CredentialsError("revoked", "it was revoked"), "revoked"),
        (errors.SettingsError("a setting"), "own_folder"),
        (OSError(24, "Too many open files"), "failed"),
        (ValueError("check_hostname requires server_hostname"), "failed"),
        (unverified(99), "certificate_99"),
    ],
)
def test_every_error_has_a_reason_of_one_word(error, reason):
    assert between_labs.reason_of(error) == reason


def test_contexts_are_fresh_and_show_this_labs_newest_certificate(own_pki):
    labs, made = own_pki.labs, []
    for _ in range(2):
        renewed = lab_folders.renew(labs.authority, labs.s, "switch")
        context = between_labs.server_context(labs.s)
        assert isinstance(context, tls.Context)
        assert context.certificate == renewed.public_bytes(tls.DER)
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.num_tickets == 0
        made.append(context)
    for context in made:  # who was given an old one is served by it
        client = visitor(between_labs.client_context(labs.t))
        assert meet(lambda c=context: c, client, labs.s) == ("served", "welcome")
