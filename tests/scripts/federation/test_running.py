"""The commands to a running switch: they need its answer, and the owner's token."""

import nebula_command
import pytest
import two_labs

from nebula_jax.security.accounts import identity, tokens


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

    monkeypatch.setattr(identity.Identity, "open", never)


@pytest.mark.parametrize("command", ["status", "rotate", "doctor"])
@pytest.mark.usefixtures("accounts_stay_closed")
def test_a_token_that_serves_needs_no_accounts(lab, command):
    lab(command)


@pytest.mark.usefixtures("accounts_stay_closed")
def test_the_owner_gets_another_token_for_one_that_is_missing(lab):
    (lab.path / tokens.OWNER).unlink()
    lab("status")
    assert tokens.owner(lab.path)


@pytest.mark.usefixtures("accounts_stay_closed")
def test_what_a_switch_refuses_for_another_reason_needs_none_either(lab, monkeypatch):
    def refuse(*given):
        raise PermissionError("not today")

    monkeypatch.setattr("nebula_jax.security.membership.member.renewal_request", refuse)
    assert "not today" in lab.fails("rotate")
