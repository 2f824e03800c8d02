"""The checkup of a lab's folder: each thing that is wrong is found, and named."""

import datetime

import nebula_command
import pytest
from cryptography.hazmat.primitives import serialization
from lab_folders import at, certify

from nebula_jax.security import policy, private_files
from nebula_jax.security.membership import (
    authority,
    checkup,
    member,
    revocation,
    site_folder,
)

ORDER = [
    *("folder", "certificate of the switch", "certificate of the trainer"),
    *("key that issues", "key of its root", "revocation list", "policy", "audit log"),
]
HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def folder(tmp_path):
    return nebula_command.Lab(tmp_path / "s").folder


def wrong(folder, now=None):
    """What is wrong -> why."""
    found = at(now or site_folder.utc_now(), checkup.folder, folder)
    return {each.what: each.text for each in found if each.state == checkup.WRONG}


def test_a_new_lab_is_in_order(folder):
    folder.root_key.rename(folder.path.with_name("root.pem"))
    found = checkup.folder(folder)
    assert [each.what for each in found] == ORDER
    assert {each.state for each in found} == {checkup.FINE}
    assert str(found[-1]).startswith("ok     audit log: ")


def test_no_check_changes_the_folder(folder):
    def state():
        files = [each for each in folder.path.rglob("*") if each.is_file()]
        return {each: each.read_bytes() for each in files}

    before = state()
    checkup.folder(folder)
    assert state() == before


def test_a_folder_that_others_can_read_is_the_only_finding(folder):
    folder.path.chmod(0o755)
    assert list(wrong(folder)) == ["folder"]
    assert "chmod 700" in wrong(folder)["folder"]


def test_a_certificate_whose_renewal_is_late_or_that_has_expired(folder):
    now = site_folder.utc_now()
    for hours, words in ((40, None), (50, "its renewal is late"), (121, "expired on")):
        found = wrong(folder, now + hours * HOUR)
        for role in site_folder.ROLES:
            text = found.get(f"certificate of the {role}")
            assert (text is None) if words is None else (words in text)
    _, due = at(now + 40 * HOUR, checkup.certificate, folder, "switch")
    assert "due for renewal" in due or "renewal is due" in due


def test_a_roots_key_that_is_still_online_is_named_with_what_to_do(folder):
    _, *_, found, _, _, _ = checkup.folder(folder)
    assert (found.what, found.state) == ("key of its root", checkup.UNCLEAR)
    assert f"{folder.root_key} is online" in found.text
    assert "move it" in found.text
    folder.root_key.chmod(0o640)
    assert "root.pem: others can use it (mode 0640)" in wrong(folder)["folder"]


def test_the_key_that_issues_lasts_a_year_and_notice_is_given_until_it_is_new(folder):
    soon = site_folder.utc_now() + 306 * 24 * HOUR
    assert "key that issues" not in wrong(folder, soon - 2 * 24 * HOUR)
    assert "nebula rekey root.pem" in wrong(folder, soon)["key that issues"]
    issuer = authority.LocalAuthority(folder)
    log = private_files.read(folder.audit / "key.pem").encode()
    log = serialization.load_pem_private_key(log, None)
    at(soon, issuer.replace_key, folder.root_key.read_bytes())
    key, csr = member.new_request()
    pem = at(soon, certify, issuer, csr, "lab-s", "switch", log)
    at(soon, member.install, folder, "switch", key, pem)
    assert "key that issues" not in wrong(folder, soon)


def test_a_revocation_list_that_is_old_missing_or_rolled_back(folder):
    now = site_folder.utc_now()
    assert (
        "a newer one should have come"
        in (at(now + 49 * HOUR, checkup.revocation_list, folder)[1])
    )
    with pytest.raises(revocation.ListRefused, match="expired"):
        at(now + 8 * 24 * HOUR, checkup.revocation_list, folder)
    folder.list_of("switch").with_suffix(".number").write_text("7\n")
    assert "number 7 was here already" in wrong(folder)["revocation list"]
    folder.list_of("switch").rename(folder.path / "away")
    assert "no revocation list" in wrong(folder)["revocation list"]


def test_a_policy_that_cannot_be_read(folder):
    (folder.path / policy.FILE).write_text("{")
    assert "cannot be read" in wrong(folder)["policy"]
    (folder.path / policy.FILE).write_text('{"jobs": {}}')
    assert not wrong(folder)


def test_an_altered_entry_of_the_audit_log(folder):
    log = folder.audit / "log.jsonl"
    log.write_text(log.read_text().replace("founded", "visited"))
    assert "entries 0 to 2 (lines 1 to 3) are not as" in wrong(folder)["audit log"]


def test_a_folder_without_a_lab(tmp_path):
    found = checkup.folder(site_folder.Folder(tmp_path / "none"))
    assert [each.what for each in found] == ["folder"]
    assert "nebula init" in found[0].text


def test_what_a_file_holds_does_nothing_to_a_terminal():
    assert str(checkup.Check("x", checkup.FINE, "a\x1b[2Jb\nc")) == "ok     x: a�[2Jb�c"
