"""A lab's own credentials: keys stay, three files change as one, bad ones stay out."""

import datetime
import os
import re
import stat
import threading
import time

import lab_folders
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from nebula_jax import disk
from nebula_jax.security.membership import authority, member, site_folder
from nebula_jax.security.tls import certificates

HOUR = datetime.timedelta(hours=1)
DAY = 24 * HOUR


@pytest.fixture
def labs(tmp_path):
    return lab_folders.copy(tmp_path)


def folders(folder, role="switch"):
    names = disk.names(folder.of(role))
    return [name for name in names if name.startswith(f"{role}.")]


def request_and_certificate(labs, lab="lab-t", role="switch", now=None):
    key, csr = member.new_request()
    return key, labs.authority.certify(csr, lab, role, now)


def refused(labs, reason, key, pem, ca=None, now=None):
    """Asserts that credentials are not installed, and the old ones stay."""
    before = member.load(labs.t, "switch")
    ca = ca or labs.authority.certificate()
    with pytest.raises(member.CredentialsRefused) as error:
        member.install(labs.t, "switch", key, pem, ca, now)
    assert error.value.reason == reason
    assert "\n" not in str(error.value)
    assert member.load(labs.t, "switch") == before


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
    assert installed.public_bytes(serialization.Encoding.PEM) == pem
    assert site_folder.fingerprint(loaded.authority) == labs.authority.fingerprint
    kept = serialization.load_pem_private_key(
        (loaded.folder / "key.pem").read_bytes(), None
    )
    assert kept.private_numbers() == key.private_numbers()
    trainers = member.load(labs.t, "trainer").certificate
    assert trainers.public_key() != installed.public_key()


def test_new_credentials_are_another_folder_and_the_last_two_stay(labs):
    assert os.readlink(labs.t.switch) == "switch.1"
    for number in (2, 3, 4):
        for each in labs.t.path.glob("switch.*"):
            os.utime(each, (0, time.time() - member.KEPT_SECONDS - 1))
        lab_folders.renew(labs.authority, labs.t, "switch")
        assert os.readlink(labs.t.switch) == f"switch.{number}"
        assert folders(labs.t) == [f"switch.{number - 1}", f"switch.{number}"]
    assert folders(labs.t, "trainer") == ["trainer.1"]
    assert stat.S_IMODE((labs.t.path / "switch.4").stat().st_mode) == 0o700
    key = labs.t.path / "switch.4" / "key.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_what_was_replaced_a_moment_ago_can_still_be_read(labs):
    """However often: a process that is slow has followed the link before."""
    former = member.load(labs.t, "switch").folder
    os.utime(former, (0, 0))  # it was in use for long
    for _ in range(4):
        lab_folders.renew(labs.authority, labs.t, "switch")
    assert len(list(former.iterdir())) == 3
    os.utime(labs.t.path / "switch.2", (0, 0))  # which replaced it
    lab_folders.renew(labs.authority, labs.t, "switch")
    assert folders(labs.t) == [f"switch.{number}" for number in (2, 3, 4, 5, 6)]


def test_the_hundredth_folder_follows_the_ninety_ninth(labs):
    (labs.t.path / "switch.99").mkdir(mode=0o700)
    (labs.t.path / "switch.9.old").mkdir(mode=0o700)  # somebody else's
    lab_folders.renew(labs.authority, labs.t, "switch")
    assert os.readlink(labs.t.switch) == "switch.100"
    lab_folders.renew(labs.authority, labs.t, "switch")
    assert os.readlink(labs.t.switch) == "switch.101"
    assert "switch.9.old" in folders(labs.t)


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
    assert os.readlink(labs.t.switch) == "switch.21"


@pytest.mark.parametrize("call", ["replace", "symlink"])
def test_a_failure_on_the_way_leaves_the_old_credentials(labs, monkeypatch, call):
    before = member.load(labs.t, "switch")
    key, pem = request_and_certificate(labs)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(site_folder.FederationError, match="No space left"):
        member.install(labs.t, "switch", key, pem, labs.authority.certificate())
    monkeypatch.undo()
    assert member.load(labs.t, "switch") == before
    lab_folders.renew(labs.authority, labs.t, "switch")
    assert member.load(labs.t, "switch") != before


def test_a_folder_in_place_of_the_link_is_not_replaced(labs):
    labs.t.switch.rename(labs.t.path / "gone")
    certificates.write(labs.t.switch, certificates.Credentials(b"", b"", b""))
    with pytest.raises(site_folder.FederationError, match="switch: "):
        lab_folders.renew(labs.authority, labs.t, "switch")


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
        with pytest.raises(member.CredentialsRefused) as error:
            member.load(labs.t, "switch", now + later)
        assert error.value.reason == reason
        assert "switch.1/cert.pem" in str(error.value)
    for folder in (labs.s, labs.t):
        with pytest.raises(
            member.CredentialsRefused, match="a running `nebula switch`"
        ):
            member.load(folder, "switch", now + 121 * HOUR)


def test_a_key_that_others_can_read_is_refused(labs):
    """Input 80 of the reference."""
    key = labs.t.path / "switch" / "key.pem"
    key.chmod(0o644)
    with pytest.raises(site_folder.FederationError, match=re.escape(f"600 {key}")):
        member.load(labs.t, "switch")


def test_a_swapped_pair_is_refused(labs):
    """The other half of input 80."""
    keys = [labs.t.credentials(role) / "key.pem" for role in site_folder.ROLES]
    contents = [key.read_bytes() for key in keys]
    for key, content in zip(keys, reversed(contents), strict=True):
        key.write_bytes(content)
    for role in site_folder.ROLES:
        with pytest.raises(member.CredentialsRefused, match="is for another key"):
            member.load(labs.t, role)


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_files_that_are_missing_or_damaged(labs, name):
    path = labs.t.switch / name
    path.write_bytes(b"no PEM")
    with pytest.raises(site_folder.FederationError, match="switch: cannot be read"):
        member.load(labs.t, "switch")
    path.rename(labs.t.path / "gone")
    with pytest.raises(site_folder.FederationError, match=r"needs ca\.pem"):
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
    (labs.t.switch / "ca.pem").write_bytes(another.certificate())
    with pytest.raises(member.CredentialsRefused) as error:
        member.pinned_authority(labs.t)
    assert error.value.reason == "unknown_authority"


def test_an_authority_of_no_lab(labs):
    leaf = member.load(labs.t, "switch").certificate
    with pytest.raises(member.CredentialsRefused, match="of no lab"):
        member.issuing_lab(leaf)


@pytest.fixture
def certificate(tmp_path):
    """A certificate of five days that is valid from midnight on."""
    begin = datetime.datetime(2026, 5, 4, tzinfo=datetime.UTC)
    now = begin + datetime.timedelta(seconds=60)
    folder = site_folder.Folder(tmp_path / "lab")
    life = 5 * DAY - datetime.timedelta(seconds=60)
    issuer = authority.LocalAuthority.create(folder, "lab-s", now, life)
    pem = issuer.certify(member.new_request().csr, "lab-s", "switch", now)
    found = x509.load_pem_x509_certificate(pem)
    assert (found.not_valid_before_utc, found.not_valid_after_utc) == (
        begin,
        begin + 5 * DAY,
    )
    return found


def test_a_certificate_is_renewed_from_a_fifth_of_its_life_on(certificate):
    begin = certificate.not_valid_before_utc
    second = datetime.timedelta(seconds=1)
    assert not member.renewal_due(certificate, begin)
    assert not member.renewal_due(certificate, begin + DAY - second)
    for later in (second, HOUR, 8 * HOUR, 30 * DAY):
        assert member.renewal_due(certificate, begin + DAY + later)
