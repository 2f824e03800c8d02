"""The commands about people, on the folder of a lab."""

import stat
import time
from unittest import mock

import nebula_command
import pytest
import two_labs
from nebula_command import PASSWORD

from nebula_jax.security import accounts, private_files
from nebula_jax.security.accounts import identity
from scripts.federation import arguments

OTHER = "another horse battery"


@pytest.fixture
def lab(tmp_path):
    return nebula_command.Lab(tmp_path / "s")


def account(lab, name):
    with identity.Identity.open(lab.path) as found:
        return found.find(name)


def test_an_account_is_added_with_a_password_and_is_active(lab):
    found = lab("account", "add", "ana", stdin=f"{PASSWORD}\n")
    assert found.out.startswith("ana is a new account: researcher, active\n")
    assert account(lab, "ana").state == "active"
    assert stat.S_IMODE((lab.path / "users/ana").stat().st_mode) == 0o700
    assert lab.kinds()[-1] == "account.add"
    assert "account ana already" in lab.fails(
        "account", "add", "ana", stdin=f"{PASSWORD}\n"
    )


def test_a_login_writes_a_token_that_nobody_else_reads(lab, tmp_path):
    written = tmp_path / "password"
    written.write_text(f"{PASSWORD}\n")
    lab("account", "add", "ana", "--password_file", written)
    found = lab("login", "ana", "--password_file", written)
    path = lab.path / "users/ana/token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert found.out.startswith("ana is logged in until 20")
    assert found.err == ""
    with identity.Identity.open(lab.path) as here:
        who = here.account_of(path.read_text().strip(), time.time())
    assert who.name == "ana"
    token = path.read_text().strip()
    lab("logout", "ana")
    assert not path.exists()
    with (
        identity.Identity.open(lab.path) as here,
        pytest.raises(Exception, match="log"),
    ):
        here.account_of(token, time.time())
    assert "nebula login ana" in lab.fails("logout", "ana")
    assert "nebula login ana" in lab.fails("account", "list", "--account", "ana")


@pytest.mark.parametrize("name", ["ana--maria", "ben-"])
def test_every_account_that_may_be_added_can_be_used(lab, name):
    lab.add(name)
    lab("grants", "--account", name)
    lab("logout", name)


def test_no_secret_is_printed_or_recorded(lab):
    printed = []
    for argv in (["account", "add", "ana"], ["login", "ana"]):
        printed += lab(*argv, stdin=f"{PASSWORD}\n")[1:]
    printed += lab("login", "ana", stdin=f"{OTHER}\n", status=1)[1:]
    printed += lab("account", "password", "ana", stdin=f"{OTHER}\n")[1:]
    printed += lab("login", "ana", stdin=f"{OTHER}\n")[1:]
    printed += lab("account", "list")[1:]
    printed += lab("audit", "show")[1:]
    secrets = [PASSWORD, OTHER, *lab.secrets()]
    assert len(secrets) == 4
    logged = b"".join(
        p.read_bytes() for p in lab.folder.audit.rglob("*") if p.is_file()
    )
    for each in secrets:
        assert not any(each in text for text in printed)
        assert each.encode() not in logged
        assert each.encode() not in (lab.path / "identity.sqlite").read_bytes()


@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        ("", "nothing was given"),
        ("\n", "nothing was given"),
        ("short\n", "at least 12 characters"),
        ("x" * 5000, "at most 1024 bytes"),
    ],
)
def test_a_password_that_does_not_serve_leaves_no_account(lab, stdin, words):
    assert words in lab.fails("account", "add", "ana", stdin=stdin)
    assert "ana" not in lab("account", "list").out


def test_on_a_terminal_the_password_is_typed_twice():
    terminal = mock.patch("sys.stdin", mock.Mock(isatty=lambda: True))
    with (
        terminal,
        mock.patch("getpass.getpass", side_effect=["a", "b"]),
        pytest.raises(arguments.InputError, match="the two differ"),
    ):
        arguments.secret("password", None, twice=True)
    with terminal, mock.patch("getpass.getpass", side_effect=["a"]):
        assert arguments.secret("password", None) == "a"


def test_a_file_that_is_no_text_holds_no_secret(tmp_path):
    path = tmp_path / "password"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(arguments.InputError, match="it is no text"):
        arguments.secret("password", path)


def test_a_wrong_password_and_a_wrong_name_are_answered_alike(lab):
    lab("account", "add", "ana", stdin=f"{PASSWORD}\n")
    wrong = lab.fails("login", "ana", stdin=f"{OTHER}\n")
    assert wrong == lab.fails("login", "nobody", stdin=f"{OTHER}\n")
    assert lab.kinds()[-2:] == ["login.refused", "login.refused"]
    for _ in range(6):
        found = lab.fails("login", "ana", stdin=f"{OTHER}\n")
    assert "too many tries" in found


def test_the_life_of_an_account(lab):
    lab.add("ana")
    assert "it cannot remove" in lab.fails("account", "remove", "ana")
    assert lab("account", "suspend", "ana").out == "ana is suspended\n"
    assert "is suspended" in lab.fails("login", "ana", stdin=f"{PASSWORD}\n")
    assert "log in again" in lab.fails("data", "list", "--account", "ana")
    assert lab("account", "resume", "ana").out == "ana is active\n"
    lab("account", "suspend", "ana")
    assert lab("account", "remove", "ana").out == "ana is removed\n"
    assert "not given again" in lab.fails(
        "account", "add", "ana", stdin=f"{PASSWORD}\n"
    )
    assert lab.kinds().count("account.suspend") == 2


def test_a_crash_while_the_owners_token_is_replaced_locks_nobody_out(lab, monkeypatch):
    """The file has the new token, and the accounts have the old password."""
    write = private_files.write

    def die(path, text):
        write(path, text)
        raise RuntimeError("the machine dies")

    owner = accounts.name_for(arguments.user())
    running = two_labs.Running(lab.folder, listens=True)
    with monkeypatch.context() as patched:
        patched.setattr(private_files, "write", die)
        with pytest.raises(RuntimeError, match="dies"):
            lab("account", "password", owner, stdin=f"{PASSWORD}\n")
    lab("status")
    running.stop()
    lab("account", "password", owner, stdin=f"{PASSWORD}\n")
    lab("login", owner, stdin=f"{PASSWORD}\n")


def test_roles_and_limits(lab):
    lab.add("ana")
    assert lab("account", "role", "ana", "auditor").out == "ana is auditor now\n"
    assert lab("account", "role", "ana", "king", status=2).out == ""
    assert lab(
        "account", "limits", "ana", "--share", "2.5", "--line_bytes", "1e9"
    ).out == ("ana has a share of 2.5, 1,000,000,000 bytes over the line\n")
    lab("account", "limits", "ana", "--line_bytes", "none")
    assert account(lab, "ana").limits == (2.5, None)
    assert "no whole number" in lab.fails(
        "account", "limits", "ana", "--line_bytes", "much"
    )
    listed = lab("account", "list").out
    assert listed.splitlines()[0].startswith("account  role")
    assert "ana      auditor  active  2.5    0" in listed
    assert lab.kinds()[-3:] == ["account.role", "account.limits", "account.limits"]


def test_an_account_that_has_logged_in_does_what_its_role_may(lab):
    lab.add("ana")
    lab.add("olga", "operator")
    refused = lab.fails("account", "suspend", "olga", "--account", "ana")
    assert "ana (researcher) may not do account.suspend" in refused
    assert "may not do account.list" in lab.fails("account", "list", "--account", "ana")
    assert "may not do account.add" in lab.fails(
        "account", "add", "eva", "--role", "owner", "--account", "olga"
    )
    lab("account", "suspend", "ana", "--account", "olga")
    assert "olga suspended account ana" in lab("audit", "show").out


def test_ones_own_password_needs_the_present_one(lab):
    lab.add("ana")
    change = ("account", "password", "ana", "--account", "ana")
    assert "no account has this" in lab.fails(*change, stdin=f"{OTHER}\n{OTHER}\n")
    found = lab(*change, stdin=f"{PASSWORD}\n{OTHER}\n")
    assert found.out == "ana has a new password; log in again\n"
    lab.fails("data", "list", "--account", "ana")
    lab("login", "ana", stdin=f"{OTHER}\n")
    lab("account", "password", "ana", stdin=f"{PASSWORD}\n")  # by the owner
    lab("login", "ana", stdin=f"{PASSWORD}\n")


def test_what_the_audit_log_does_not_take_is_not_done(lab):
    with mock.patch(
        "nebula_jax.security.audit.log.Log.append", side_effect=OSError("full")
    ):
        lab.fails("account", "add", "ana", stdin=f"{PASSWORD}\n")
    assert "ana" not in lab("account", "list").out
