"""The revocation list of a lab: signed, and never older than one that was here."""

import base64
import datetime

import lab_folders
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from nebula_jax import files
from nebula_jax.security.membership import (
    authority,
    member,
    revocation,
    site_folder,
)
from nebula_jax.security.tls import certificates

HOUR = datetime.timedelta(hours=1)
DAY = 24 * HOUR
PEM = serialization.Encoding.PEM


@pytest.fixture
def labs(tmp_path):
    return lab_folders.copy(tmp_path)


def signer_of(labs):
    """The authority's certificate and key."""
    return labs.authority._signer


def signed(labs, number, now=None, signer=None, revoked=()):
    """A list that is well made."""
    now = now or site_folder.utc_now()
    since = [(serial, now) for serial in revoked]
    made = certificates.revocation_list(
        signer or signer_of(labs), number, since, *lab_folders.period(now)
    )
    return made.public_bytes(PEM)


def refused(listed, pem, reason, now=None):
    number = listed.number
    with pytest.raises(revocation.ListRefused) as error:
        listed.accept(pem, now)
    assert error.value.reason == reason
    assert listed.number == number
    listed.check()


def test_a_revoked_certificate_is_on_the_list_when_it_has_come(labs):
    listed = revocation.RevocationList(labs.s)
    serial = member.load(labs.t, "switch").certificate.serial_number
    assert listed.number == 1
    assert not listed.is_revoked(serial)
    assert labs.authority.revoke("lab-t") == 2
    assert listed.accept(labs.authority.revocation_list())
    assert listed.is_revoked(serial)
    assert listed.number == 2
    assert not listed.is_revoked(serial + 1)
    assert listed.pem() == labs.authority.revocation_list()


def test_a_list_is_taken_once_and_no_older_or_other_one_after_it(labs):
    listed = revocation.RevocationList(labs.s)
    pem = signed(labs, 5, revoked=[77])
    assert listed.accept(pem)
    for again in (pem, signed(labs, 1), signed(labs, 4)):
        assert not listed.accept(again)
    refused(listed, signed(labs, 5), "revocation_list_conflicting")
    assert listed.number == 5
    assert listed.is_revoked(77)


def test_a_list_that_the_authority_has_not_signed_is_refused(labs, tmp_path):
    listed = revocation.RevocationList(labs.s)
    own = signer_of(labs)
    thief = certificates.Authority(
        own.certificate, ec.generate_private_key(ec.SECP256R1())
    )
    refused(listed, signed(labs, 9, signer=thief), "revocation_list_forged")
    other = lab_folders.make(tmp_path / "other")
    refused(listed, signed(other, 9), "revocation_list_forged")
    # A lab signs with its own key, in the authority's name or its own.
    key = serialization.load_pem_private_key(labs.t.switch.read_bytes(), None)
    certificate = member.load(labs.t, "switch").certificate
    for named in (own.certificate, certificate):
        pem = signed(labs, 9, signer=certificates.Authority(named, key))
        refused(listed, pem, "revocation_list_forged")


def test_a_list_in_another_name_or_with_a_weak_digest_is_refused(labs):
    """Though the right key has signed it."""
    own = signer_of(labs)
    other = certificates.authority(
        own.key,
        certificates.name("authority 1", "lab-s"),
        *lab_folders.period(site_folder.utc_now()),
    )
    pem = signed(labs, 9, signer=other)
    listed = revocation.RevocationList(labs.s)
    refused(listed, pem, "revocation_list_forged")
    pem = partial_list(labs, (x509.CRLNumber(9), False), digest=hashes.SHA224())
    refused(listed, pem, "revocation_list_forged")


@pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")
def test_every_flipped_bit_of_what_is_signed_is_noticed(labs):
    listed = revocation.RevocationList(labs.s)
    made = x509.load_pem_x509_crl(signed(labs, 9, revoked=[77]))
    der = made.public_bytes(serialization.Encoding.DER)
    refused_ones = 0
    for place in range(8 * len(der)):
        damaged = bytearray(der)
        damaged[place // 8] ^= 1 << place % 8
        try:
            found = x509.load_der_x509_crl(bytes(damaged))
            pem = found.public_bytes(PEM)
        except (ValueError, x509.InvalidVersion):
            pem = b"-----BEGIN X509 CRL-----\n%s\n-----END X509 CRL-----\n" % (
                base64.encodebytes(bytes(damaged)).strip()
            )
        try:
            listed.accept(pem)
        except revocation.ListRefused:
            refused_ones += 1
        else:  # the count of unused bits around the signature, which has no meaning
            assert found.tbs_certlist_bytes == made.tbs_certlist_bytes
    assert refused_ones >= 8 * len(der) - 8


@pytest.mark.parametrize(
    "pem",
    [
        *(b"", b"no list", b"\xff" * 100, b"-----BEGIN X509 CRL-----\n"),
        b"x" * (revocation.MOST_BYTES + 1),
    ],
)
def test_what_is_no_list(labs, pem):
    refused(revocation.RevocationList(labs.s), pem, "revocation_list_malformed")


def partial_list(labs, *extensions, digest=None):
    """A list with other extensions, signed by the authority."""
    now = site_folder.utc_now()
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(signer_of(labs).certificate.subject)
        .last_update(now)
        .next_update(now + DAY)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    made = builder.sign(signer_of(labs).key, digest or hashes.SHA256())
    return made.public_bytes(PEM)


def test_a_list_without_a_number_or_of_a_part_only_is_refused(labs):
    listed = revocation.RevocationList(labs.s)
    number = (x509.CRLNumber(9), False)
    of_users = x509.IssuingDistributionPoint(
        None, None, True, False, None, False, False
    )
    for extensions in (
        [],
        [(x509.CRLNumber(0), False)],
        [(x509.CRLNumber(10**18), False)],
        [number, (x509.DeltaCRLIndicator(8), True)],
        [number, (of_users, True)],
    ):
        pem = partial_list(labs, *extensions)
        refused(listed, pem, "revocation_list_malformed")
    assert listed.accept(partial_list(labs, number))


def test_what_comes_along_with_a_list_is_not_kept(labs):
    """OpenSSL would trust a certificate that it found in the file of the list."""
    listed = revocation.RevocationList(labs.s)
    pem = signed(labs, 9)
    assert listed.accept(pem + labs.authority.certificate() + b"and more")
    assert labs.s.revocation_list.read_bytes() == pem
    labs.s.revocation_list.write_bytes(pem + labs.authority.certificate())
    for each in (listed, revocation.RevocationList(labs.s)):
        with pytest.raises(revocation.ListRefused, match="has more than a") as error:
            each.is_revoked(1)
        assert error.value.reason == "revocation_list_malformed"


def test_a_file_that_was_rolled_back_is_refused_after_a_restart(labs):
    """Input 74 of the reference."""
    older = labs.s.revocation_list.read_bytes()
    revocation.RevocationList(labs.s).accept(signed(labs, 5, revoked=[77]))
    newest = labs.s.revocation_list.read_bytes()
    labs.s.revocation_list.write_bytes(older)
    restarted = revocation.RevocationList(labs.s)
    for call in (restarted.check, restarted.pem, lambda: restarted.is_revoked(77)):
        with pytest.raises(revocation.ListRefused, match="number 5 was here") as error:
            call()
        assert error.value.reason == "revocation_list_rolled_back"
    assert restarted.number == 5  # what peers are shown
    assert not restarted.accept(signed(labs, 4))
    with pytest.raises(revocation.ListRefused):
        restarted.check()
    assert restarted.accept(newest)
    restarted.check()
    assert restarted.is_revoked(77)


def test_a_list_that_is_missing_is_refused_until_there_is_one(labs):
    older = labs.s.revocation_list.read_bytes()
    revocation.RevocationList(labs.s).accept(signed(labs, 5))
    newest = labs.s.revocation_list.read_bytes()
    labs.s.revocation_list.rename(labs.s.path / "gone")
    listed = revocation.RevocationList(labs.s)
    with pytest.raises(revocation.ListRefused, match="there is no") as error:
        listed.is_revoked(1)
    assert error.value.reason == "revocation_list_missing"
    assert not listed.accept(older)
    assert listed.accept(newest)
    listed.check()


def test_a_new_lab_has_no_list_and_admits_nobody(labs, tmp_path):
    folder = site_folder.Folder(tmp_path / "u")
    labs.authority.admit("lab-u")
    folder.create("lab-u", lab_folders.ADDRESS, labs.authority.fingerprint)
    lab_folders.renew(labs.authority, folder, "switch")
    listed = revocation.RevocationList(folder)
    assert listed.number == 0
    with pytest.raises(revocation.ListRefused):
        listed.check()
    assert listed.accept(labs.authority.revocation_list())
    listed.check()


def test_a_list_must_be_valid_now(labs):
    """Input 72: without news of the authority, nobody can be trusted for ever."""
    listed = revocation.RevocationList(labs.s)
    now = site_folder.utc_now()
    listed.check(now + 5 * DAY - HOUR)
    for when, reason in ((5 * DAY, "expired"), (-HOUR, "not_yet_valid")):
        with pytest.raises(revocation.ListRefused, match=r"nobody is|clock") as error:
            listed.check(now + when)
        assert error.value.reason == f"revocation_list_{reason}"
        refused(listed, signed(labs, 9, now - when), f"revocation_list_{reason}")
    pem = signed(labs, 9, now)
    end = x509.load_pem_x509_crl(pem).next_update_utc
    refused(listed, pem, "revocation_list_expired", end)
    assert listed.accept(signed(labs, 9, now - 5 * DAY + HOUR))


def test_a_crash_between_the_two_files_undoes_nothing(labs, monkeypatch):
    listed = revocation.RevocationList(labs.s)
    writing = files.writing

    def crash(path):
        if path == labs.s.revocation_number:
            raise OSError(5, "Input/output error")
        return writing(path)

    monkeypatch.setattr(files, "writing", crash)
    with pytest.raises(site_folder.FederationError, match="Input/output error"):
        listed.accept(signed(labs, 5, revoked=[77]))
    monkeypatch.undo()
    for each in (listed, revocation.RevocationList(labs.s)):
        each.check()
        assert each.number == 5
        assert each.is_revoked(77)
        assert not each.accept(signed(labs, 4))
    assert labs.s.revocation_number.read_text() == "5\n"  # at the restart
    labs.s.revocation_list.write_bytes(signed(labs, 4))
    with pytest.raises(revocation.ListRefused, match="number 5 was here"):
        revocation.RevocationList(labs.s).check()


def test_a_list_that_another_process_has_taken_is_in_force_here(labs):
    """As when a person revokes, and the switch runs on."""
    ours, other = (revocation.RevocationList(labs.s) for _ in range(2))
    assert not ours.is_revoked(77)
    other.accept(signed(labs, 5, revoked=[77]))
    assert ours.is_revoked(77)
    assert ours.number == 5
    assert not ours.accept(signed(labs, 4))


@pytest.mark.parametrize("text", ["", "five", "-1", "1" * 19, "5\n5\n"])
def test_a_number_that_cannot_be_read_is_named(labs, text):
    labs.s.revocation_number.write_text(text)
    with pytest.raises(
        site_folder.FederationError, match=r"crl\.number: has no number"
    ):
        revocation.RevocationList(labs.s)


def test_a_lab_without_the_authoritys_certificate(tmp_path):
    folder = site_folder.Folder(tmp_path / "new")
    folder.create("lab-t", lab_folders.ADDRESS, "0f" * 32)
    folder.revocation_list.write_bytes(b"")
    with pytest.raises(site_folder.FederationError, match="no credentials"):
        revocation.RevocationList(folder)


def test_no_list_is_accepted_of_an_authority_that_is_not_pinned(labs, tmp_path):
    other = authority.LocalAuthority.create(
        site_folder.Folder(tmp_path / "other"), "lab-s"
    )
    labs.s.switch.write_bytes(labs.s.switch.read_bytes() + other.certificate())
    listed = revocation.RevocationList(labs.t)
    with pytest.raises(member.CredentialsRefused):
        revocation.RevocationList(labs.s)
    refused(listed, other.revocation_list(), "revocation_list_forged")
