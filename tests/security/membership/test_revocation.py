"""The revocation list of a lab: signed, and never older than one that was here."""

import datetime
import json
import threading

import lab_folders
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from lab_folders import at

from nebula_jax import files
from nebula_jax.security.membership import (
    member,
    revocation,
    site_folder,
)
from nebula_jax.security.tls import certificates

HOUR = datetime.timedelta(hours=1)
DAY = 24 * HOUR
NEW = {"lab-t": 2**34}  # a list in which all of lab-t is revoked


@pytest.fixture
def labs(tmp_path):
    return lab_folders.copy(tmp_path)


def signed(labs, number, now=None, key=None, revoked=()):
    """A list that is well made."""
    signer = labs.authority._keys().signer
    signer = signer._replace(key=key or signer.key)
    period = lab_folders.period(now or site_folder.utc_now())
    return revocation.sign(signer, number, dict(revoked), *period)


def is_out(listed, lab="lab-t"):
    """Whether certificates of a lab that begin now are revoked."""
    return listed.is_revoked(lab, site_folder.utc_now())


def refused(listed, text, reason, now=None):
    number = listed.number
    with pytest.raises(revocation.ListRefused) as error:
        at(now or site_folder.utc_now(), listed.accept, text)
    assert error.value.reason == reason
    assert listed.number == number
    listed.check()


def test_a_lab_is_revoked_when_the_list_has_come(labs):
    listed = revocation.RevocationList(labs.t)
    begin = member.load(labs.t, "switch").certificate.not_valid_before_utc
    assert listed.number == 1
    assert not listed.is_revoked("lab-t", begin)
    assert labs.authority.revoke("lab-t") == 2
    number, text = labs.authority.revocation_list()
    assert listed.accept(text)
    assert listed.is_revoked("lab-t", begin)
    assert not listed.is_revoked("lab-s", begin)
    assert listed.number == number == 2
    assert listed.present().text == text


def test_a_list_is_taken_once_and_no_older_or_other_one_after_it(labs):
    listed = revocation.RevocationList(labs.s)
    text = signed(labs, 5, revoked=NEW)
    assert listed.accept(text)
    for again in (text, signed(labs, 1), signed(labs, 4)):
        assert not listed.accept(again)
    refused(listed, signed(labs, 5), "revocation_list_conflicting")
    assert listed.number == 5
    assert is_out(listed)


def test_a_list_that_the_authority_has_not_signed_is_refused(labs, tmp_path):
    listed = revocation.RevocationList(labs.s)
    other = lab_folders.make(tmp_path / "other")
    theirs = other.authority._keys().signer.key
    of_lab = serialization.load_pem_private_key(labs.t.switch.read_bytes(), None)
    for key in (ec.generate_private_key(ec.SECP256R1()), theirs, of_lab):
        refused(listed, signed(labs, 9, key=key), "revocation_list_forged")
    refused(listed, signed(other, 9), "revocation_list_forged")
    certificate = member.load(labs.t, "switch").certificate
    as_lab = certificates.Authority(certificate, of_lab)
    text = revocation.sign(as_lab, 9, {}, *lab_folders.period(site_folder.utc_now()))
    refused(listed, text, "revocation_list_forged")


def test_what_the_authority_signs_for_another_purpose_is_no_list(labs):
    body, _, shown = signed(labs, 9).splitlines()
    key = labs.authority._keys().signer.key
    for data, digest in (
        (body.encode(), hashes.SHA256()),
        (b"nebula renewal 1\0" + body.encode(), hashes.SHA256()),
        (b"nebula revocations 1\0" + body.encode(), hashes.SHA224()),
    ):
        text = f"{body}\n{key.sign(data, ec.ECDSA(digest)).hex()}\n{shown}\n"
        refused(revocation.RevocationList(labs.s), text, "revocation_list_forged")


def test_every_flipped_bit_is_noticed(labs):
    listed = revocation.RevocationList(labs.s)
    data = signed(labs, 9, revoked=NEW).encode()
    whole = len(data.rpartition(b"\n3")[0])  # of the certificate, every eleventh bit
    for place in (*range(8 * whole), *range(8 * whole, 8 * len(data), 11)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(revocation.ListRefused):
            listed.accept(damaged.decode("utf-8", "replace"))


@pytest.mark.parametrize(
    "text",
    ["", "no list", "\ufffd" * 100, "{}\n", "{}\n11\n\n", "{}\nzz\n", "x" * (1 << 19)],
)
def test_what_is_no_list(labs, text):
    refused(revocation.RevocationList(labs.s), text, "revocation_list_malformed")


def test_what_comes_along_with_a_list_is_refused(labs):
    text, more = signed(labs, 9), labs.authority.certificate().decode()
    listed = revocation.RevocationList(labs.s)
    refused(listed, text + more, "revocation_list_malformed")
    assert listed.accept(text)
    labs.s.list_of("switch").write_text(text + more)
    for each in (listed, revocation.RevocationList(labs.s)):
        with pytest.raises(revocation.ListRefused, match="no revocation list") as error:
            is_out(each)
        assert error.value.reason == "revocation_list_malformed"


def test_a_list_that_lacks_something_is_refused_whoever_signed_it(labs):
    body, _, shown = signed(labs, 9).splitlines()
    body, key = json.loads(body), labs.authority._keys().signer.key
    for wrong in ({}, body | {"number": "9"}, body | {"revoked": []}, body | {"x": 1}):
        data = json.dumps(wrong).encode()
        proof = key.sign(b"nebula revocations 1\0" + data, ec.ECDSA(hashes.SHA256()))
        text = f"{data.decode()}\n{proof.hex()}\n{shown}\n"
        refused(revocation.RevocationList(labs.s), text, "revocation_list_malformed")


def test_a_file_that_was_rolled_back_is_refused_after_a_restart(labs):
    """Input 74 of the reference."""
    older = labs.s.list_of("switch").read_text()
    revocation.RevocationList(labs.s).accept(signed(labs, 5, revoked=NEW))
    newest = labs.s.list_of("switch").read_text()
    labs.s.list_of("switch").write_text(older)
    restarted = revocation.RevocationList(labs.s)
    for call in (restarted.check, restarted.present, lambda: is_out(restarted)):
        with pytest.raises(revocation.ListRefused, match="number 5 was here") as error:
            call()
        assert error.value.reason == "revocation_list_rolled_back"
    assert restarted.number == 5  # what peers are shown
    assert not restarted.accept(signed(labs, 4))
    with pytest.raises(revocation.ListRefused):
        restarted.check()
    assert restarted.accept(newest)
    restarted.check()
    assert is_out(restarted)


def test_a_list_that_is_missing_is_refused_until_there_is_one(labs):
    older = labs.s.list_of("switch").read_text()
    revocation.RevocationList(labs.s).accept(signed(labs, 5))
    newest = labs.s.list_of("switch").read_text()
    labs.s.list_of("switch").rename(labs.s.path / "gone")
    listed = revocation.RevocationList(labs.s)
    with pytest.raises(revocation.ListRefused, match="there is no") as error:
        is_out(listed)
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
    assert listed.accept(labs.authority.revocation_list()[1])
    listed.check()


def test_a_list_must_be_valid_now(labs):
    """Input 72: without news of the authority, nobody can be trusted for ever."""
    listed = revocation.RevocationList(labs.s)
    now = site_folder.utc_now()
    at(now + 5 * DAY - HOUR, listed.check)
    for when, reason in ((5 * DAY, "expired"), (-HOUR, "not_yet_valid")):
        with pytest.raises(revocation.ListRefused, match=r"nobody is|clock") as error:
            at(now + when, listed.check)
        assert error.value.reason == f"revocation_list_{reason}"
        refused(listed, signed(labs, 9, now - when), f"revocation_list_{reason}")
    text = signed(labs, 9, now)
    end = json.loads(text.partition("\n")[0])["end"]
    end = datetime.datetime.fromtimestamp(end, datetime.UTC)
    refused(listed, text, "revocation_list_expired", end)
    assert listed.accept(signed(labs, 9, now - 5 * DAY + HOUR))


def test_a_crash_between_the_two_files_undoes_nothing(labs, monkeypatch):
    listed = revocation.RevocationList(labs.s)
    writing = files.writing

    def crash(path):
        if path == labs.s.list_of("switch").with_suffix(".number"):
            raise OSError(5, "Input/output error")
        return writing(path)

    monkeypatch.setattr(files, "writing", crash)
    with pytest.raises(site_folder.FederationError, match="Input/output error"):
        listed.accept(signed(labs, 5, revoked=NEW))
    monkeypatch.undo()
    for each in (listed, revocation.RevocationList(labs.s)):
        each.check()
        assert each.number == 5
        assert is_out(each)
        assert not each.accept(signed(labs, 4))
    assert (
        labs.s.list_of("switch").with_suffix(".number").read_text() == "5\n"
    )  # at the restart
    labs.s.list_of("switch").write_text(signed(labs, 4))
    with pytest.raises(revocation.ListRefused, match="number 5 was here"):
        revocation.RevocationList(labs.s).check()


def test_a_list_that_another_process_has_taken_is_in_force_here(labs):
    """As when a person revokes, and the switch runs on."""
    ours, other = (revocation.RevocationList(labs.s) for _ in range(2))
    assert not is_out(ours)
    other.accept(signed(labs, 5, revoked=NEW))
    assert is_out(ours)
    assert ours.number == 5
    assert not ours.accept(signed(labs, 4))


def test_two_processes_do_not_take_lists_at_once(labs, monkeypatch):
    """The older one would be written over the newer one, and its number stay."""
    ours, other = (revocation.RevocationList(labs.s) for _ in range(2))
    writing, taken = files.writing, []
    older = threading.Thread(target=lambda: taken.append(ours.accept(signed(labs, 4))))

    def while_another_comes(path):
        if not older.ident:
            older.start()
            older.join(0.2)
            assert older.is_alive()  # it waits for the lock
        return writing(path)

    monkeypatch.setattr(files, "writing", while_another_comes)
    assert other.accept(signed(labs, 5, revoked=NEW))
    older.join(20)
    assert taken == [False]
    assert is_out(revocation.RevocationList(labs.s))


@pytest.mark.parametrize("text", ["", "five", "-1", "1" * 19, "5\n5\n"])
def test_a_number_that_cannot_be_read_is_named(labs, text):
    labs.s.list_of("switch").with_suffix(".number").write_text(text)
    with pytest.raises(
        site_folder.FederationError, match=r"revoked\.number: has no number"
    ):
        revocation.RevocationList(labs.s)


def test_a_text_that_no_file_can_have_is_no_list(labs):
    """JSON of another switch may have half of a pair: it must end no thread here."""
    listed = revocation.RevocationList(labs.s)
    text = signed(labs, 5)
    refused(listed, "\ud800" + text, "revocation_list_malformed")
