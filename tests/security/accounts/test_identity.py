"""The life of accounts, by whom, and whose a token is."""

import json
import re

import pytest
import tiny_accounts
from tiny_accounts import NOW, PASSWORD, begin, owner, person, reopen

from nebula_jax.security import private_files
from nebula_jax.security.accounts import (
    IdentityError,
    Limits,
    logins,
    passwords,
    roles,
    tokens,
)
from nebula_jax.security.accounts.identity import Identity
from nebula_jax.security.accounts.roles import DeniedError


@pytest.fixture
def record():
    return tiny_accounts.Records()


@pytest.fixture
def here(tmp_path, record):
    with begin(tmp_path / "federation", record=record) as here:
        yield here


def test_a_folder_has_an_owner_from_the_start(here, tmp_path):
    root = owner(here)
    assert root[:3] == ("root", "owner", "active")
    assert here.listing() == [root]
    modes = {each.name: each.stat().st_mode & 0o777 for each in here.folder.iterdir()}
    assert modes.pop("owner.token") == 0o600
    assert set(modes.values()) == {0o600}
    assert here.folder.stat().st_mode & 0o777 == 0o700
    assert here.folder == tmp_path / "federation"


def test_beginning_again_changes_nothing(here):
    token = here.owner_token()
    person(here, "ana")
    with begin(here.folder) as again:
        assert again.owner_token() == token
        assert [each.name for each in again.listing()] == ["ana", "root"]
    with pytest.raises(IdentityError, match="belongs to account root, not to ben"):
        Identity.begin(here.folder, "ben", NOW)
    with pytest.raises(IdentityError, match="is no account's name"):
        Identity.begin(here.folder, "../ben", NOW)


@pytest.mark.parametrize("there", [None, "", "junk\n", "A" * 43 + "\n"])
def test_beginning_again_mends_the_owners_token(here, there):
    path = here.folder / "owner.token"
    before = here.owner_token()
    if there is None:
        path.unlink()
    else:
        private_files.write(path, there)
    with begin(here.folder) as again:
        assert owner(again).name == "root"
    with pytest.raises(tokens.TokenError, match="revoked"):
        here.account_of(before, NOW)


def test_a_token_of_another_account_is_not_the_owners(here):
    person(here, "ana")
    anas = logins.login(here, "ana", PASSWORD, NOW).token
    private_files.write(here.folder / "owner.token", anas)
    with begin(here.folder) as again:
        assert owner(again).name == "root"


def test_others_can_read_neither_the_folder_nor_the_token(here):
    (here.folder / "owner.token").chmod(0o644)
    with pytest.raises(private_files.PrivateFileError, match="chmod 600"):
        here.owner_token()
    with pytest.raises(private_files.PrivateFileError, match="chmod 600"):
        begin(here.folder)
    here.folder.chmod(0o755)
    for opened in (begin, reopen):
        with pytest.raises(private_files.PrivateFileError, match="chmod 700"):
            opened(here.folder)


def test_a_crash_before_the_first_commit_is_mended(tmp_path):
    def fail(*_, **__):
        raise OSError("power cut")

    with pytest.raises(OSError, match="power cut"):
        begin(tmp_path, record=fail)
    with begin(tmp_path) as here:
        assert owner(here).name == "root"


def test_a_life(here, record):
    root = owner(here)
    assert here.add(root, "ana", "researcher", NOW).state == "created"
    assert here.activate(root, "ana", PASSWORD).state == "active"
    token = logins.login(here, "ana", PASSWORD, NOW).token
    assert here.account_of(token, NOW) == here.find("ana")
    assert here.suspend(root, "ana").state == "suspended"
    with pytest.raises(tokens.TokenError, match="revoked"):
        here.account_of(token, NOW)
    assert here.resume(root, "ana").state == "active"
    with pytest.raises(tokens.TokenError, match="revoked"):  # for good
        here.account_of(token, NOW)
    here.suspend(root, "ana")
    assert here.remove(root, "ana").state == "removed"
    for change in (here.suspend, here.resume, here.remove):
        with pytest.raises(IdentityError, match="nothing, this is final"):
            change(root, "ana")
    with pytest.raises(IdentityError, match="its name is not given again"):
        here.add(root, "ana", "researcher", NOW)
    with pytest.raises(IdentityError, match="removed, which is final"):
        here.set_role(root, "ana", "owner")
    with pytest.raises(IdentityError, match="removed, which is final"):
        here.set_limits(root, "ana", Limits())
    found = [(kind, what.get("before"), what.get("after")) for kind, _, what in record]
    assert found == [
        ("account.add", None, None),
        ("account.activate", "created", "active"),
        ("account.add", None, None),
        ("account.activate", "created", "active"),
        ("login", None, None),
        ("account.suspend", "active", "suspended"),
        ("account.resume", "suspended", "active"),
        ("account.suspend", "active", "suspended"),
        ("account.remove", "suspended", "removed"),
    ]
    assert {who for _, who, _ in record} == {"root", "ana"}


def test_no_step_of_a_life_is_left_out(here):
    root = owner(here)
    here.add(root, "ana", "researcher", NOW)
    for change in (here.suspend, here.resume):
        with pytest.raises(IdentityError, match="possible: activate or remove"):
            change(root, "ana")
    here.activate(root, "ana", PASSWORD)
    with pytest.raises(IdentityError, match="is active, so it cannot activate"):
        here.activate(root, "ana", PASSWORD)
    with pytest.raises(IdentityError, match="possible: suspend"):
        here.remove(root, "ana")
    for change in (here.suspend, here.remove):
        with pytest.raises(IdentityError, match="there is no account ben"):
            change(root, "ben")
    with pytest.raises(IdentityError, match="there is an account ana already"):
        here.add(root, "ana", "researcher", NOW)
    with pytest.raises(passwords.PasswordError):
        here.activate(root, "ana", "short")
    for name in ("", "\ud800", "../ana", "a'; DROP TABLE accounts"):
        with pytest.raises(IdentityError, match="no such account"):
            here.suspend(root, name)


def test_the_folders_owner_stays_what_it_is(here):
    person(here, "eve", roles.OWNER)
    eve = here.find("eve")
    for change in (here.suspend, lambda by, name: here.set_role(by, name, "auditor")):
        with pytest.raises(IdentityError, match="the folder belongs to it"):
            change(eve, "root")
    here.suspend(owner(here), "eve")  # another owner can be


def changes(here):
    """Everything that one account can do to another, or to itself."""
    return {
        "add": lambda by, name: here.add(by, f"{name}-2", "researcher", NOW),
        "activate": lambda by, name: here.activate(by, name, PASSWORD),
        "suspend": here.suspend,
        "resume": here.resume,
        "remove": here.remove,
        "role": lambda by, name: here.set_role(by, name, "owner"),
        "limits": lambda by, name: here.set_limits(by, name, Limits(9.0)),
    }


def test_nobody_changes_its_own_role_state_or_limits(here):
    for role in roles.ROLES:
        by = person(here, role, role)
        for what, change in changes(here).items():
            if what == "add" or (role, what) == ("owner", "limits"):
                continue
            with pytest.raises(DeniedError):
                change(by, by.name)
        assert here.find(role) == by


def test_an_operator_acts_on_researchers_alone(here):
    by = person(here, "ops", roles.OPERATOR)
    person(here, "ops2", roles.OPERATOR)
    for other in ("root", "ops2"):
        for what, change in changes(here).items():
            if what != "add":
                with pytest.raises(DeniedError, match=r"ops \(operator\) may|ops2 may"):
                    change(by, other)
        with pytest.raises(DeniedError):
            logins.set_password(here, by, other, "a new password of mine", NOW)
    for role in ("owner", "operator", "auditor"):
        with pytest.raises(DeniedError, match=f"role {role}"):
            here.add(by, "friend", role, NOW)
    here.add(by, "ana", "researcher", NOW)
    here.activate(by, "ana", PASSWORD)
    here.set_limits(by, "ana", Limits(2.0))
    here.suspend(by, "ana")
    with pytest.raises(DeniedError, match=r"account\.role"):
        here.set_role(by, "ana", "auditor")
    assert here.remove(by, "ana").state == "removed"


@pytest.mark.parametrize("role", ["researcher", "auditor"])
def test_a_researcher_or_an_auditor_changes_no_account(here, role):
    by = person(here, "ana", role)
    before = person(here, "ben")
    for change in changes(here).values():
        with pytest.raises(DeniedError, match=rf"ana \({role}\) may not do account\."):
            change(by, "ben")
    assert here.listing() == [by, before, owner(here)]


def test_a_role_is_read_from_the_store_and_not_from_who_claims_it(here):
    ana = person(here, "ana")
    person(here, "ben")
    with pytest.raises(DeniedError, match=r"ana \(researcher\) may not do"):
        here.suspend(ana._replace(role="owner"), "ben")
    eve = person(here, "eve", roles.OWNER)
    here.set_role(owner(here), "eve", "auditor")
    with pytest.raises(DeniedError, match=r"eve \(auditor\) may not do"):
        here.suspend(eve, "ben")
    here.suspend(owner(here), "eve")
    with pytest.raises(DeniedError, match="eve may do nothing: it is suspended"):
        here.suspend(eve, "ben")
    with pytest.raises(IdentityError, match="there is no account nobody"):
        here.suspend(eve._replace(name="nobody"), "ben")


def test_a_role_that_changes_is_a_tokens_at_once(here):
    person(here, "ana")
    token = logins.login(here, "ana", PASSWORD, NOW).token
    here.set_role(owner(here), "ana", "auditor")
    assert here.account_of(token, NOW).role == "auditor"


def test_a_change_that_cannot_be_recorded_is_not_made(here):
    person(here, "ana")
    before = here.listing()

    def full(kind, who, **what):
        raise OSError("no space left for the audit log")

    with reopen(here.folder, record=full) as other:
        root = owner(here)
        for what, change in changes(other).items():
            with pytest.raises((OSError, IdentityError)) as why:
                change(root, "ana")
            assert what in ("activate", "resume", "remove") or why.type is OSError
    assert here.listing() == before


def test_limits_are_kept(here):
    person(here, "ana")
    limits = Limits(0.5, 10**9, 10**6)
    assert here.set_limits(owner(here), "ana", limits).limits == limits
    assert here.find("ana").limits == limits
    here.set_limits(owner(here), "root", Limits(3.0))
    assert here.find("root").limits.share == 3.0
    with pytest.raises(IdentityError, match="more than 0"):
        here.set_limits(owner(here), "ana", Limits(0.0))


def test_a_token_ends(here):
    person(here, "ana")
    login = logins.login(here, "ana", PASSWORD, NOW)
    assert login.expires == NOW + 24 * 3600
    assert here.account_of(login.token, NOW + 24 * 3600 - 1).name == "ana"
    with pytest.raises(tokens.TokenError, match="of ana has expired: log in again"):
        here.account_of(login.token, NOW + 24 * 3600)
    assert here.account_of(here.owner_token(), NOW + 1e9).name == "root"
    logins.login(here, "ana", PASSWORD, NOW + 1e6)
    query = "SELECT count(*) FROM tokens WHERE account = 'ana'"
    assert here.store.rows(query)[0][0] == 1  # what has expired is forgotten


def test_what_is_nobodys_token(here):
    junk = "A" * 42
    for token in ("", junk + "A", junk, "A" * 10**6, "é" * 43, junk + "\n", "\ud800"):
        with pytest.raises(tokens.TokenError) as why:
            here.account_of(token, NOW)
        assert len(str(why.value)) < 100


def test_the_store_and_the_record_hold_no_secret(here, record):
    person(here, "ana")
    login = logins.login(here, "ana", PASSWORD, NOW)
    with pytest.raises(logins.LoginError):
        logins.login(here, "hunter2-typed-as-a-name", PASSWORD, NOW)
    with pytest.raises(logins.LoginError):
        logins.login(here, "ana", "another password", NOW)
    secrets = [PASSWORD, "another password", login.token, here.owner_token(), "hunter2"]
    here.close()
    kept = b"".join(
        each.read_bytes() for each in here.folder.iterdir() if "sqlite" in each.name
    )
    log = json.dumps(record) + repr(login)
    for secret in secrets:
        assert secret.encode() not in kept
        assert secret not in log
    assert "argon2" not in log
    assert re.search(rb"\$argon2id\$", kept)


def test_opening_what_is_not_there(tmp_path):
    with pytest.raises(IdentityError.__mro__[1], match="not there: nebula init"):
        reopen(tmp_path)
