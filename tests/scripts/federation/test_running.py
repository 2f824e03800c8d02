"""The commands to a running switch."""

import nebula_command
import pytest
import two_labs


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
