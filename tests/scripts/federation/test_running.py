"""The commands to a running switch."""

import datetime
from unittest import mock

import nebula_command
import pytest
import two_labs
from cryptography import x509

from nebula_jax.security.membership import site_folder
from nebula_jax.security.membership.site_folder import ROLES


@pytest.fixture
def lab(tmp_path):
    """A lab whose switch runs."""
    made = nebula_command.Lab(tmp_path / "s")
    running = two_labs.Running(made.folder, listens=True)
    yield made
    running.stop()


@pytest.mark.parametrize("command", ["status", "rotate", "doctor"])
def test_a_request_is_answered(lab, command):
    lab(command)


def test_what_a_switch_refuses_is_said(lab, monkeypatch):
    def refuse(*given):
        raise PermissionError("not today")

    monkeypatch.setattr("nebula_jax.security.membership.member.renewal_request", refuse)
    assert "not today" in lab.fails("rotate")


def test_the_switch_records_what_commands_change(lab):
    """It alone has the audit log open."""
    lab("account", "add", "ana")
    assert lab.kinds()[-1] == "account.add"
    assert "audit log: its entries are as they were signed" in lab("doctor").out


def test_the_authoritys_lab_joins_again_by_its_own_invitation(lab):
    """As after a theft of its keys: all that it had is revoked."""
    before = [lab.folder.credentials(role).read_bytes() for role in ROLES]
    invitation = lab("invite", "lab-s").out
    assert "next" not in lab("join", "--name", "lab-s", stdin=invitation).out
    after = [lab.folder.credentials(role).read_bytes() for role in ROLES]
    assert not set(before) & set(after)
    assert "revocation list: number 2" in lab("doctor").out


def test_the_authoritys_lab_joins_again_when_it_was_off_for_weeks(tmp_path):
    """Its trainers are another user's: their folder needs the new credentials."""
    made = nebula_command.Lab(tmp_path / "s")
    made.folder.trainer.rename(tmp_path / "trainer.pem")
    weeks = site_folder.utc_now() + datetime.timedelta(days=40)
    with mock.patch.object(site_folder, "utc_now", return_value=weeks):
        running = two_labs.Running(made.folder, listens=True)
        try:
            invitation = made("invite", "lab-s").out
            printed = made("join", "--name", "lab-s", stdin=invitation).out
        finally:
            running.stop()
    assert f"{made.folder.trainer} replaces the one" in printed
    new = x509.load_pem_x509_certificates(made.folder.switch.read_bytes())[0]
    assert new.not_valid_after_utc > weeks
