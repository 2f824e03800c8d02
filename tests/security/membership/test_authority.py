"""The authority: what it certifies, for whom, and what it revokes."""

import base64
import concurrent.futures
import contextlib
import datetime
import json
import shutil
import stat
import time

import lab_folders
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from lab_folders import at
from two_contexts import shake_hands

from nebula_jax import errors
from nebula_jax.security.membership import (
    authority,
    invitations,
    member,
    revocation,
    site_folder,
)
from nebula_jax.security.tls import between_labs, certificates, credentials

DER = serialization.Encoding.DER

NOW = datetime.datetime(2026, 5, 4, 12, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)
DAY = datetime.timedelta(days=1)


@pytest.fixture(autouse=True)
def clock(monkeypatch, request):
    """It is NOW, but for tests with folders that others share."""
    if "issuer" in request.fixturenames:
        monkeypatch.setattr(site_folder, "utc_now", lambda: NOW)


@pytest.fixture
def issuer(tmp_path, clock):
    """The authority of lab-s, which has admitted lab-t."""
    made = lab_folders.create(tmp_path / "s")
    made.admit("lab-t")
    return made


@pytest.fixture
def labs(tmp_path):
    """Both labs, whose authority is at `labs.s`."""
    return lab_folders.copy(tmp_path)


def certify(issuer, lab="lab-t", role="switch", now=None, csr=None):
    csr = csr or member.new_request().csr
    return x509.load_pem_x509_certificate(
        at(now or site_folder.utc_now(), issuer.certify, csr, lab, role)
    )


def refused(words, call, *given, **more):
    """Asserts that the authority refuses; returns the reason. `words` may be None."""
    with pytest.raises(site_folder.Refusal, match=words) as why:
        call(*given, **more)
    assert len(str(why.value)) < 200
    return why.value.reason


def come(issuer, lab="lab-t", line=None):
    """A lab comes with its invitation."""
    line = line or issuer.invite(lab, lab_folders.ADDRESS)
    lab_folders.redeem(issuer, invitations.parse(line).secret, lab)


@contextlib.contextmanager
def restored(labs, tmp_path):
    """Afterwards the authority comes back from a copy of what it was before."""
    shutil.copytree(labs.s.authority, tmp_path / "copy")
    yield
    shutil.rmtree(labs.s.authority)
    shutil.copytree(tmp_path / "copy", labs.s.authority)


def request(key, digest=None):
    """A request for a key, with names that nobody granted."""
    wanted = [x509.DNSName(each) for each in ("lab-s", "trainer.lab-s")]
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(certificates.name("lab", "lab-s"))
        .add_extension(x509.SubjectAlternativeName(wanted), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    return builder.sign(key, digest).public_bytes(serialization.Encoding.PEM)


def value(certificate, kind):
    return certificate.extensions.get_extension_for_class(kind).value


def body(issuer, now=None):
    """The newest revocation list."""
    return json.loads(
        at(now or site_folder.utc_now(), issuer.revocation_list)[1].partition("\n")[0]
    )


def is_revoked(issuer, *certificates, lab="lab-t"):
    """Whether each of a lab's certificates is revoked."""
    begin = body(issuer)["revoked"].get(lab, 0)
    return [each.not_valid_before_utc.timestamp() < begin for each in certificates]


@pytest.mark.parametrize(
    ("role", "name"), [("switch", "lab-t"), ("trainer", "trainer.lab-t")]
)
def test_a_certificate_is_for_a_role_of_a_lab_on_either_side_for_five_days(
    issuer, role, name
):
    """Names in a request do not count."""
    key = ec.generate_private_key(ec.SECP256R1())
    found = certify(issuer, role=role, csr=request(key, hashes.SHA256()))
    assert found.public_key() == key.public_key()
    assert not found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert list(value(found, x509.SubjectAlternativeName)) == [x509.DNSName(name)]
    assert list(value(found, x509.ExtendedKeyUsage)) == list(credentials.USAGES)
    assert not value(found, x509.BasicConstraints).ca
    assert not value(found, x509.KeyUsage).key_cert_sign
    assert found.not_valid_before_utc == NOW - datetime.timedelta(seconds=60)
    assert found.not_valid_after_utc == NOW + 5 * DAY
    found.verify_directly_issued_by(issuer._keys().signer.certificate)


CURVES = (ec.SECP192R1(), ec.SECP224R1(), ec.SECP256K1(), ec.SECP384R1())


@pytest.mark.parametrize(
    "key",
    [
        *(rsa.generate_private_key(65537, bits) for bits in (1024, 2048)),
        *map(ec.generate_private_key, CURVES),
        ed25519.Ed25519PrivateKey.generate(),
    ],
)
def test_other_keys_are_not(issuer, key):
    is_edwards = isinstance(key, ed25519.Ed25519PrivateKey)
    csr = request(key, None if is_edwards else hashes.SHA256())
    assert refused("must be P-256", certify, issuer, csr=csr) == "weak_key"


def test_a_request_must_be_signed_with_its_own_key(issuer):
    """Who has not the key would be certified for another's."""
    der = x509.load_pem_x509_csr(member.new_request().csr).public_bytes(DER)
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    point = serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    own = x509.load_der_x509_csr(der).public_key().public_bytes(*point)
    other = der.replace(own, key.public_bytes(*point))
    assert other != der
    pem = x509.load_der_x509_csr(other).public_bytes(serialization.Encoding.PEM)
    assert refused(None, certify, issuer, csr=pem) == "bad_signature"


@pytest.mark.parametrize(
    "csr",
    [
        *(b"no request", b"\xff" * 100, b"-----BEGIN CERTIFICATE REQUEST-----\n"),
        member.new_request().csr[:-60],
        member.new_request().csr + b"x" * authority.MOST_REQUEST_BYTES,
    ],
)
def test_what_is_no_request(issuer, csr):
    refused("no certificate request", certify, issuer, csr=csr)


def test_no_flipped_bit_of_a_request_raises_anything_else():
    csr = x509.load_pem_x509_csr(member.new_request().csr)
    der = csr.public_bytes(DER)
    for place in range(8 * len(der)):
        damaged = bytearray(der)
        damaged[place // 8] ^= 1 << place % 8
        pem = (
            b"-----BEGIN CERTIFICATE REQUEST-----\n%s-----END CERTIFICATE REQUEST-----"
            % (base64.encodebytes(bytes(damaged)))
        )
        with contextlib.suppress(site_folder.Refusal):
            assert authority.requested_key(pem) == csr.public_key()


def test_only_members_are_certified(issuer):
    for lab in ("lab-u", "trainer.lab-t", "", "lab-t'; --", "x" * 10_000):
        assert refused("needs an invitation", certify, issuer, lab) == "no_member"
    assert issuer.members() == ["lab-s", "lab-t"]


def test_a_life_is_no_longer_than_the_authoritys(issuer):
    own = issuer._keys().signer.certificate
    last = own.not_valid_after_utc - HOUR / 2
    assert certify(issuer, "lab-s", now=last).not_valid_after_utc == (
        own.not_valid_after_utc
    )


def test_the_authority_signs_no_other_authority_and_has_its_labs_name(issuer):
    own = x509.load_pem_x509_certificate(issuer.certificate())
    for depth, each in enumerate((issuer._keys().signer.certificate, own)):
        each.verify_directly_issued_by(own)
        constraints = each.extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert constraints.value == x509.BasicConstraints(ca=True, path_length=depth)
    assert member.issuing_lab(own) == issuer.lab == "lab-s"
    assert own.not_valid_after_utc - NOW == datetime.timedelta(days=3650)
    assert issuer.fingerprint == site_folder.fingerprint(own)


def test_a_revoked_lab_is_on_the_list_and_gets_no_other_certificate(issuer):
    assert (body(issuer)["number"], body(issuer)["revoked"]) == (1, {})
    both = [certify(issuer, role=role) for role in site_folder.ROLES]
    other = certify(issuer, "lab-s")
    assert issuer.revoke("lab-t") == 2
    assert is_revoked(issuer, *both) == [True, True]
    assert is_revoked(issuer, other, lab="lab-s") == [False]
    again = authority.LocalAuthority(issuer._folder)
    for each in (issuer, again):
        refused("or was revoked", certify, each)
    assert again.revoke("lab-t") == 3  # once more
    assert is_revoked(again, *both) == [True, True]


def test_a_clock_that_was_ahead_leaves_no_certificate_unrevoked(issuer):
    early = certify(issuer, now=NOW + 3 * DAY)
    issuer.revoke("lab-t")
    assert is_revoked(issuer, early) == [True]
    issuer.admit("lab-t")
    assert is_revoked(issuer, early, certify(issuer)) == [True, False]


def renewal_of(folder, role="trainer"):
    return member.renewal_request(folder, role)[1]


def test_the_key_of_a_certificate_and_no_other_renews_it(labs):
    """A switch carries its trainers' requests, and would get one for its own key."""
    own = renewal_of(labs.t)
    as_switch = renewal_of(labs.t, "switch")
    forged = member.new_request()
    for wrong in (
        own._replace(csr=forged.csr),
        own._replace(csr=forged.csr, proof=as_switch.proof),
        as_switch._replace(certificate=own.certificate),
        own._replace(proof=b""),
        own._replace(certificate=labs.authority.certificate()),
        own._replace(certificate=b"none"),
    ):
        refused("not signed with the key", labs.authority.renew, wrong)
    assert labs.authority.renew(own)[1:] == ("lab-t", "trainer")
    assert labs.authority.renew(as_switch)[1:] == ("lab-t", "switch")


def test_a_certificate_that_is_in_no_log_renews_nothing(labs):
    """Who has the authority's key could make one for a key of its own."""
    key, csr = member.new_request()
    pem = labs.authority.certify(csr, "lab-t", "trainer")
    ca = labs.authority.certificate()
    for each in (pem, labs.authority.attach(pem, b"x")):
        member.install(labs.t, "trainer", key, each, ca)
        reason = refused("in this lab's log", labs.authority.renew, renewal_of(labs.t))
        assert reason == "unlogged"


def test_a_receipt_is_put_into_a_certificate_of_this_authority_once(labs, tmp_path):
    other, csr = lab_folders.make(tmp_path / "b"), member.new_request().csr
    whole = lab_folders.certify(labs.authority, csr, "lab-t", "switch")
    theirs = other.authority.certify(csr, "lab-t", "switch")
    for pem in (whole, theirs, labs.authority.certificate(), b"none"):
        refused("no certificate of the", labs.authority.attach, pem, bytes(64))
    # A certificate of one would else look like a forged one of the other.
    one, two = (
        each._keys().signer.certificate for each in (labs.authority, other.authority)
    )
    assert one.issuer != two.issuer


def test_the_key_is_replaced_by_its_root_and_no_lab_joins_again(labs, tmp_path):
    issuer, old = labs.authority, renewal_of(labs.t)
    running = authority.LocalAuthority(labs.s)  # as that of the switch
    before, (_, last) = running._keys().signer, running.revocation_list()
    root = labs.s.root_key.rename(tmp_path / "kept elsewhere")
    for wrong in (b"", labs.s.authority_key.read_bytes()):
        with pytest.raises(site_folder.FederationError, match="not the key of the fed"):
            issuer.replace_key(wrong)
    assert issuer.replace_key(root.read_bytes()) == 2
    after = running._keys().signer
    assert after.key.public_key() != before.key.public_key()
    listed = revocation.RevocationList(labs.t)
    assert listed.accept(running.revocation_list()[1])
    assert not listed.accept(last)
    # Certificates of before serve, and are renewed; lists of the old key do not.
    der = member.load(labs.t, "switch").certificate.public_bytes(DER)
    assert between_labs.check_peer(der, labs.s).lab == "lab-t"
    life = lab_folders.period(site_folder.utc_now())
    with pytest.raises(revocation.ListRefused) as error:
        listed.accept(revocation.sign(before, 9, {}, *life))
    assert error.value.reason == "revocation_list_superseded"
    x509.load_pem_x509_certificate(running.renew(old)[0]).verify_directly_issued_by(
        after.certificate
    )
    lab_folders.renew(running, labs.t, "switch")
    for one, other in ((labs.s, labs.t), (labs.t, labs.s)):
        server = between_labs.server_context(one)
        client = between_labs.client_context(other)
        shake_hands(server, client, name=one.load().name)


def test_a_key_that_issues_and_has_ended_is_replaced_and_labs_renew_themselves(labs):
    issuer, days = labs.authority, 24 * HOUR
    end = issuer._keys().signer.certificate.not_valid_after_utc
    at(end - 2 * days, lab_folders.renew, issuer, labs.t, "trainer")
    renewal, later = renewal_of(labs.t), end + 2 * days
    with pytest.raises(site_folder.Refusal, match=r"ended on .* nebula rekey root"):
        at(later, issuer.renew, renewal)
    at(later, issuer.replace_key, labs.s.root_key.read_bytes())
    made = x509.load_pem_x509_certificate(at(later, issuer.renew, renewal)[0])
    assert made.not_valid_after_utc == later + authority.LEAF_LIFETIME
    made.verify_directly_issued_by(issuer._keys().signer.certificate)


def test_an_expired_certificate_is_renewed_within_its_grace(labs):
    renew, now = labs.authority.renew, site_folder.utc_now()
    for lab in (labs.s, labs.t):  # the authority's own as well: its keys may be stolen
        for days in (3, 18.9):
            assert at(now + days * DAY, renew, renewal_of(lab))[1] == lab.load().name
        late, words = now + 19.5 * DAY, "another invitation"
        assert refused(words, at, late, renew, renewal_of(lab)) == "expired"


def test_what_a_lab_had_before_it_was_revoked_renews_nothing(labs):
    old = renewal_of(labs.t)
    labs.authority.revoke("lab-t")
    refused("was revoked", labs.authority.renew, old)
    later = site_folder.utc_now() + DAY
    at(later, come, labs.authority)
    refused("was revoked", at, later, labs.authority.renew, old)


@pytest.mark.parametrize("was_revoked", [True, False])
def test_a_lab_that_joins_again_is_certified_anew_once_it_has_come(issuer, was_revoked):
    old = certify(issuer)
    if was_revoked:
        issuer.revoke("lab-t")
    line = issuer.invite("lab-t", lab_folders.ADDRESS)
    if was_revoked:
        refused(None, certify, issuer)
    assert is_revoked(issuer, old) == [was_revoked]
    come(issuer, line=line)
    assert is_revoked(issuer, old, certify(issuer)) == [True, False]


def test_of_labs_that_never_came_the_invited_ones_are_revoked(issuer):
    line = issuer.invite("lab-u", lab_folders.ADDRESS)
    issuer.revoke("lab-u")
    with pytest.raises(site_folder.Refusal, match="no such invitation"):
        come(issuer, "lab-u", line)
    with pytest.raises(site_folder.FederationError, match="was not invited"):
        issuer.revoke("lab-v")
    with pytest.raises(site_folder.FederationError, match="nebula invite lab-s"):
        issuer.revoke("lab-s")


def test_every_list_has_a_greater_number_and_lasts_five_days(issuer):
    numbers = []
    for hour in (0, 1, 23, 24, 25, 47, 48):
        now = NOW + hour * HOUR
        found = body(issuer, now)
        numbers.append(found["number"])
        left = found["end"] - now.timestamp()
        assert 4 * DAY.total_seconds() < left <= 5 * DAY.total_seconds()
        assert found["begin"] < now.timestamp()
    assert numbers == [1, 1, 1, 2, 2, 2, 3]
    assert found == body(issuer, now + HOUR)


def test_of_a_revocation_and_a_renewal_at_once_no_certificate_escapes(issuer, tmp_path):
    """Both in processes of their own: a switch renews while a person revokes."""
    csr = member.new_request().csr

    def renew(handle):
        made = []
        for _ in range(50):
            try:
                made.append(certify(handle, csr=csr))
            except site_folder.Refusal:
                break
        return made

    folder = issuer._folder
    handles = [authority.LocalAuthority(folder) for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        renewals = [pool.submit(renew, handle) for handle in handles[:2]]
        issuer.revoke("lab-t")
        issued = [made for each in renewals for made in each.result()]
    assert all(is_revoked(handles[2], *issued))


def test_of_revocations_at_once_each_list_has_those_of_before(issuer, monkeypatch):
    """Each in a process of its own, and as if signing took long."""
    sign = revocation.sign

    def slow(*given):
        time.sleep(0.02)
        return sign(*given)

    monkeypatch.setattr(revocation, "sign", slow)
    names = [f"lab-{number}" for number in range(8)]
    for name in names:
        come(issuer, name)
    revoke = [authority.LocalAuthority(issuer._folder).revoke for _ in names]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda call, name: call(name), revoke, names))
    assert sorted(numbers) == list(range(1, 9))
    assert body(issuer)["revoked"].keys() == set(names)


def test_an_authority_that_comes_back_from_a_copy_forgets_no_revocation(labs, tmp_path):
    """Its ledger then has certificates and labs from before."""
    now, names = site_folder.utc_now(), ("lab-t", "lab-u", "lab-v")
    for lab in names:
        labs.authority.admit(lab)
    old = {lab: certify(labs.authority, lab, now=now) for lab in names}
    listed = revocation.RevocationList(labs.s)
    with restored(labs, tmp_path):
        issuer = authority.LocalAuthority(labs.s)
        late = certify(issuer, "lab-u", now=now)
        for lab in names[:2]:
            issuer.revoke(lab)
        assert listed.number == 3

    issuer = authority.LocalAuthority(labs.s)
    assert issuer.revoke("lab-v") == listed.number == 4
    for lab, each in (*old.items(), ("lab-u", late)):
        assert listed.is_revoked(lab, each.not_valid_before_utc)


def test_an_authority_from_a_copy_renews_nothing_that_was_revoked(labs, tmp_path):
    """Also before it has signed a list, which takes in what this lab's has."""
    with restored(labs, tmp_path):
        labs.authority.revoke("lab-t")
    issuer = authority.LocalAuthority(labs.s)
    refused("was revoked", issuer.renew, renewal_of(labs.t))


def test_key_and_ledger_are_for_this_user_alone(issuer):
    folder = issuer._folder
    for path in (folder.authority_key, folder.authority_ledger):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_authority_is_made_once_and_its_files_are_named_when_damaged(tmp_path):
    folder = site_folder.Folder(tmp_path / "s")
    with pytest.raises(site_folder.FederationError, match="`nebula init` was run"):
        authority.LocalAuthority(folder)
    lab_folders.create(folder.path)
    with pytest.raises(site_folder.FederationError, match="an authority is here"):
        lab_folders.create(folder.path)
    pem = folder.authority_key.read_bytes()
    for contents in (b"no key", pem[:-40], b""):
        folder.authority_key.write_bytes(contents)
        with pytest.raises(site_folder.FederationError, match=r"authority\.pem: "):
            authority.LocalAuthority(folder)
    folder.authority_key.write_bytes(pem)
    for damaged in (b"no ledger" * 100, b"{}", b"[]", b"\xff"):
        folder.authority_ledger.write_bytes(damaged)
        with pytest.raises(errors.NebulaError, match=r"ledger\.json: (the file|is no)"):
            authority.LocalAuthority(folder)
