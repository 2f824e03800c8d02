"""A lab's own credentials: keys stay, three files change as one, bad ones stay out."""

import datetime
import stat
import threading

import lab_folders
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from lab_folders import at

from nebula_jax import disk, errors
from nebula_jax.security import private_files
from nebula_jax.security.membership import authority, member, site_folder
from nebula_jax.security.tls import credentials

HOUR = datetime.timedelta(hours=1)
DAY = 24 * HOUR


@pytest.fixture
def labs(tmp_path):
    return lab_folders.copy(tmp_path)


def request_and_certificate(labs, lab="lab-t", role="switch", now=None):
    key, csr = member.new_request()
    now = now or site_folder.utc_now()
    return key, at(now, labs.authority.certify, csr, lab, role)


def refused(labs, reason, key, pem, ca=None):
    """Asserts that credentials are not installed, and the old ones stay."""
    before = member.load(labs.t, "switch")
    ca = ca or labs.authority.certificate()
    with pytest.raises(credentials.CredentialsError) as error:
        member.install(labs.t, "switch", key, pem, ca)
    assert error.value.reason == reason
    assert "\n" not in str(error.value)
    assert member.load(labs.t, "switch").pem == before.pem


def test_the_key_is_not_in_the_request():
    key, csr = member.new_request()
    secret = key.private_numbers().private_value.to_bytes(32)
    der = x509.load_pem_x509_csr(csr).public_bytes(serialization.Encoding.DER)
    assert secret not in der
    assert x509.load_pem_x509_csr(csr).public_key() == key.public_key()
    assert x509.load_pem_x509_csr(csr).is_signature_valid
    assert member.new_request().key.private_numbers() != key.private_numbers()


def test_what_was_installed_is_loaded(labs):
    key, pem = request_and_certificate(labs)
    installed = member.install(labs.t, "switch", key, pem, labs.authority.certificate())
    loaded = member.load(labs.t, "switch")
    assert loaded.certificate == installed
    assert pem.startswith(installed.public_bytes(serialization.Encoding.PEM))
    assert site_folder.fingerprint(loaded.authority) == labs.authority.fingerprint
    kept = serialization.load_pem_private_key(labs.t.switch.read_bytes(), None)
    assert kept.private_numbers() == key.private_numbers()
    trainers = member.load(labs.t, "trainer").certificate
    assert trainers.public_key() != installed.public_key()


def test_a_reader_never_sees_a_key_with_another_certificate(labs):
    """While 20 rotations go on, by two writers."""
    stop = threading.Event()
    problems, loaded = [], set()

    def read():
        while not stop.is_set():
            try:
                loaded.add(member.load(labs.t, "switch").certificate.serial_number)
            except Exception as error:
                problems.append(error)

    def write():
        for _ in range(10):
            lab_folders.renew(labs.authority, labs.t, "switch")

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write) for _ in range(2)]
    for each in (*readers, *writers):
        each.start()
    for each in writers:
        each.join()
    stop.set()
    for each in readers:
        each.join()
    assert not problems
    assert len(loaded) > 2
    assert stat.S_IMODE(labs.t.switch.stat().st_mode) == 0o600


def test_a_failure_on_the_way_leaves_the_old_credentials(labs, monkeypatch):
    before = member.load(labs.t, "switch")
    key, pem = request_and_certificate(labs)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "rename", fail)
    with pytest.raises(private_files.PrivateFileError, match="No space left"):
        member.install(labs.t, "switch", key, pem, labs.authority.certificate())
    monkeypatch.undo()
    assert member.load(labs.t, "switch").pem == before.pem
    lab_folders.renew(labs.authority, labs.t, "switch")
    assert member.load(labs.t, "switch").pem != before.pem


def test_bad_credentials_are_not_installed(labs, tmp_path):
    key, pem = request_and_certificate(labs)
    other_key, other_lab = request_and_certificate(labs, "lab-s")
    trainers_key, trainers = request_and_certificate(labs, role="trainer")
    now = site_folder.utc_now()
    old_key, old = request_and_certificate(labs, now=now - 6 * DAY)
    new_key, new = request_and_certificate(labs, now=now + HOUR)
    refused(labs, "wrong_key", member.new_request().key, pem)
    refused(labs, "wrong_name", other_key, other_lab)
    refused(labs, "wrong_name", trainers_key, trainers)
    refused(labs, "expired", old_key, old)
    refused(labs, "not_yet_valid", new_key, new)
    refused(labs, "malformed", key, b"no certificate")
    refused(labs, "malformed", key, pem, b"no certificate")
    refused(labs, "unknown_authority", key, pem, pem)
    another = lab_folders.make(tmp_path / "another")
    theirs_key, theirs = request_and_certificate(another)
    refused(labs, "unknown_authority", theirs_key, theirs)
    ca = another.authority.certificate()
    refused(labs, "unknown_authority", theirs_key, theirs, ca)
    member.install(labs.t, "switch", key, pem, labs.authority.certificate())


def test_own_credentials_that_have_expired_are_refused_when_they_are_loaded(labs):
    now = site_folder.utc_now()
    for later, reason in ((121 * HOUR, "expired"), (-HOUR, "not_yet_valid")):
        with pytest.raises(credentials.CredentialsError) as error:
            at(now + later, member.load, labs.t, "switch")
        assert error.value.reason == reason
        assert "switch.pem: the certificate" in str(error.value)
    for folder in (labs.s, labs.t):
        with pytest.raises(
            credentials.CredentialsError, match="a running `nebula switch`"
        ):
            at(now + 121 * HOUR, member.load, folder, "switch")


def test_a_swapped_pair_is_refused(labs):
    """The other half of input 80."""
    begin = b"-----BEGIN CERTIFICATE-----"
    paths = [labs.t.credentials(role) for role in site_folder.ROLES]
    keys, others = zip(
        *(each.read_bytes().split(begin, 1) for each in paths), strict=True
    )
    for path, key, other in zip(paths, reversed(keys), others, strict=True):
        path.write_bytes(key + begin + other)
    for role in site_folder.ROLES:
        with pytest.raises(credentials.CredentialsError, match="is for another key"):
            member.load(labs.t, role)


def test_a_file_that_is_missing_or_damaged(labs):
    path = labs.t.switch
    whole = path.read_bytes()
    for damaged in (b"no PEM", b"", whole[:-40], whole[40:], whole + whole):
        path.write_bytes(damaged)
        with pytest.raises(
            errors.NebulaError, match=r"cannot be|not the one|not issued"
        ):
            member.load(labs.t, "switch")
    path.unlink()
    with pytest.raises(site_folder.FederationError, match=r"switch\.pem: is missing"):
        member.load(labs.t, "switch")


def test_a_lab_without_credentials(tmp_path):
    folder = site_folder.Folder(tmp_path / "new")
    folder.create("lab-t", lab_folders.ADDRESS, "0f" * 32)
    for call in (
        lambda: member.load(folder, "switch"),
        lambda: member.pinned_authority(folder),
    ):
        with pytest.raises(site_folder.FederationError, match="nebula join"):
            call()


def test_the_authority_is_pinned_by_its_fingerprint(labs, tmp_path):
    found = member.pinned_authority(labs.t)
    assert site_folder.fingerprint(found) == labs.authority.fingerprint
    another = lab_folders.make(tmp_path / "another").authority
    labs.t.switch.write_bytes(labs.t.switch.read_bytes() + another.certificate())
    with pytest.raises(credentials.CredentialsError) as error:
        member.pinned_authority(labs.t)
    assert error.value.reason == "unknown_authority"


def test_an_authority_of_no_lab(labs):
    leaf = member.load(labs.t, "switch").certificate
    with pytest.raises(credentials.CredentialsError, match="of no lab"):
        member.issuing_lab(leaf)


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    """A certificate of five days that is valid from midnight on."""
    begin = datetime.datetime(2026, 5, 4, tzinfo=datetime.UTC)
    now = begin + datetime.timedelta(seconds=60)
    folder = site_folder.Folder(tmp_path / "lab")
    life = 5 * DAY - datetime.timedelta(seconds=60)
    monkeypatch.setattr(authority, "LEAF_LIFETIME", life)
    issuer = at(now, lab_folders.create, folder.path)
    pem = at(now, issuer.certify, member.new_request().csr, "lab-s", "switch")
    found = x509.load_pem_x509_certificate(pem)
    assert (found.not_valid_before_utc, found.not_valid_after_utc) == (
        begin,
        begin + 5 * DAY,
    )
    return found


def test_a_certificate_is_renewed_from_a_fifth_of_its_life_on(certificate):
    begin = certificate.not_valid_before_utc
    second = datetime.timedelta(seconds=1)
    assert not at(begin, member.renewal_due, certificate)
    assert not at(begin + DAY - second, member.renewal_due, certificate)
    for later in (second, HOUR, 8 * HOUR, 30 * DAY):
        assert at(begin + DAY + later, member.renewal_due, certificate)
