"""The commands to a running switch: they need its answer, and no accounts."""

import nebula_command
import pytest
import two_labs

from nebula_jax.security import accounts


@pytest.fixture
def lab(tmp_path):
    """A lab whose switch runs."""
    made = nebula_command.Lab(tmp_path / "s")
    running = two_labs.Running(made.folder, listens=True)
    yield made
    running.stop()


@pytest.fixture
def accounts_stay_closed(lab, monkeypatch):
    """Their file may be on a disk that the switch of another host has in use."""

    def never(*given, **more):
        raise AssertionError("the accounts were opened")

    monkeypatch.setattr(accounts.Accounts, "open", never)


@pytest.mark.parametrize("command", ["status", "rotate", "doctor"])
@pytest.mark.usefixtures("accounts_stay_closed")
def test_a_request_needs_no_accounts(lab, command):
    lab(command)


@pytest.mark.usefixtures("accounts_stay_closed")
def test_what_a_switch_refuses_for_another_reason_needs_none_either(lab, monkeypatch):
    def refuse(*given):
        raise PermissionError("not today")

    monkeypatch.setattr("nebula_jax.security.membership.member.renewal_request", refuse)
    assert "not today" in lab.fails("rotate")
