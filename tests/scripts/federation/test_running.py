"""The commands to a running switch: they need its answer, and the owner's token."""

import nebula_command
import pytest
import two_labs

from nebula_jax.security import private_files
from nebula_jax.security.accounts import identity, owner_token


@pytest.fixture
def lab(tmp_path):
    """A lab whose switch runs."""
    made = nebula_command.Lab(tmp_path / "s")
    running = two_labs.Running(made.folder, listens=True)
    yield made
    running.stop()


@pytest.fixture
def token(lab):
    """The file of the owner's token."""
    return lab.path / owner_token.NAME


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


@pytest.mark.parametrize("command", ["status", "rotate"])
@pytest.mark.parametrize("text", [None, "", "x" * 43])
def test_the_owner_gets_another_token_for_one_that_a_crash_left(
    lab, token, command, text
):
    token.unlink()
    if text is not None:
        private_files.write(token, text)
    lab(command)
    with identity.Identity.open(lab.path) as found:
        found.account_of(token.read_text().strip(), 0.0)


@pytest.mark.usefixtures("accounts_stay_closed")
def test_what_a_switch_refuses_for_another_reason_needs_none_either(lab, monkeypatch):
    def refuse(*given):
        raise PermissionError("not today")

    monkeypatch.setattr("nebula_jax.federation.joining.renew", refuse)
    assert "not today" in lab.fails("rotate")


@pytest.mark.parametrize("text", [None, "x" * 43])
def test_doctor_changes_no_token_and_names_the_command_that_does(lab, token, text):
    token.unlink()
    if text is not None:
        private_files.write(token, text)
    found = lab("doctor", status=1).out
    assert [line for line in found.splitlines() if "nebula status" in line], found
    assert (token.read_text() if token.exists() else None) == text
    lab("status")
    lab("doctor")
