"""The commands about people, on the folder of a lab."""

from unittest import mock

import tiny_accounts

from nebula_jax.security import accounts


def account(lab, name):
    return accounts.Accounts(lab.path).find(name)


def test_an_account_is_added_for_a_user_of_the_host_and_is_active(lab):
    found = lab("account", "add", "ana")
    assert found.out == "ana is a new account, of user ana of this host: active\n"
    assert account(lab, "ana")[:3] == ("ana", tiny_accounts.USERS["ana"], "active")
    assert lab.kinds()[-1] == "account.add"
    assert "account ana already" in lab.fails("account", "add", "ana")
    lab("account", "add", "benjamin", "--user", "ben")
    assert "has the account benjamin" in lab.fails("account", "add", "ben")
    assert "user=zoe: there is none on this host" in lab.fails("account", "add", "zoe")


def test_the_life_of_an_account(lab):
    lab("account", "add", "ana")
    assert "it cannot remove" in lab.fails("account", "remove", "ana")
    assert lab("account", "suspend", "ana").out == "ana is suspended\n"
    assert lab("account", "resume", "ana").out == "ana is active\n"
    lab("account", "suspend", "ana")
    assert lab("account", "remove", "ana").out == "ana is removed\n"
    assert "not given again" in lab.fails("account", "add", "ana")
    assert lab.kinds().count("account.suspend") == 2


def test_limits(lab):
    lab("account", "add", "ana")
    limits = ("account", "limits", "ana", "--line_bytes")
    found = lab(*limits, "1e9", "--share", "2.5").out
    assert found == "ana has a share of 2.5, 1,000,000,000 bytes over the line\n"
    lab(*limits, "none")
    assert account(lab, "ana").limits == (2.5, None)
    assert "no whole number" in lab.fails(*limits, "much")
    listed = lab("account", "list").out
    assert listed.splitlines()[0].startswith("account  user")
    assert "ana      60001  active  2.5    0" in listed
    assert lab.kinds()[-2:] == ["account.limits", "account.limits"]


def test_what_the_audit_log_does_not_take_is_not_done(lab):
    with mock.patch(
        "nebula_jax.security.audit.log.Log.append", side_effect=OSError("full")
    ):
        lab.fails("account", "add", "ana")
    assert "ana" not in lab("account", "list").out
