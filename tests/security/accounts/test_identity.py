"""The life of accounts, by whom, and whose a token is."""

import json
import os
import re
import threading

import pytest
import tiny_accounts
from tiny_accounts import NOW, PASSWORD, begin, owner, person, reopen

from nebula_jax.security import accounts, private_files
from nebula_jax.security.accounts import (
    IdentityError,
    Limits,
    logins,
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
    token = tokens.owner(here.folder)
    person(here, "ana")
    with begin(here.folder) as again:
        assert tokens.owner(again.folder) == token
        assert [each.name for each in again.listing()] == ["ana", "root"]
    with pytest.raises(IdentityError, match="belongs to account root, not to ben"):
        Identity.begin(here.folder, "ben")
    with pytest.raises(IdentityError, match="is no account's name"):
        Identity.begin(here.folder, "../ben")


@pytest.mark.parametrize("there", ["", "junk\n"])
def test_a_file_that_holds_no_token_is_named(here, there):
    path = here.folder / "owner.token"
    private_files.write(path, there)
    words = re.escape(f"{path}: is no token: remove it")
    with pytest.raises(private_files.PrivateFileError, match=words):
        begin(here.folder)


def test_a_token_that_is_missing_is_made_anew(here):
    before = tokens.owner(here.folder)
    (here.folder / "owner.token").unlink()
    with pytest.raises(tokens.TokenError, match="revoked"):
        here.account_of(before, NOW)
    assert owner(here).name == "root"


def test_others_can_read_neither_the_folder_nor_the_token(here):
    (here.folder / "owner.token").chmod(0o644)
    with pytest.raises(private_files.PrivateFileError, match="chmod 600"):
        tokens.owner(here.folder)
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
    assert logins.add(here, root, "ana", "researcher", PASSWORD).state == "active"
    token = logins.login(here, "ana", PASSWORD, NOW).token
    assert here.account_of(token, NOW) == here.find("ana")
    assert here.move(root, "ana", "suspend").state == "suspended"
    with pytest.raises(tokens.TokenError, match="revoked"):
        here.account_of(token, NOW)
    assert here.move(root, "ana", "resume").state == "active"
    with pytest.raises(tokens.TokenError, match="revoked"):  # for good
        here.account_of(token, NOW)
    here.move(root, "ana", "suspend")
    assert here.move(root, "ana", "remove").state == "removed"
    for event in ("suspend", "resume", "remove"):
        with pytest.raises(IdentityError, match="nothing, this is final"):
            here.move(root, "ana", event)
    with pytest.raises(IdentityError, match="its name is not given again"):
        person(here, "ana")
    with pytest.raises(IdentityError, match="removed, which is final"):
        here.set_role(root, "ana", "owner")
    with pytest.raises(IdentityError, match="removed, which is final"):
        here.set_limits(root, "ana", Limits())
    found = [(kind, what.get("before"), what.get("after")) for kind, _, what in record]
    assert found == [
        ("account.add", None, None),
        ("account.add", None, None),
        ("login", None, None),
        ("account.suspend", "active", "suspended"),
        ("account.resume", "suspended", "active"),
        ("account.suspend", "active", "suspended"),
        ("account.remove", "suspended", "removed"),
    ]
    assert {who for _, who, _ in record} == {"root", "ana"}


def test_no_step_of_a_life_is_left_out(here):
    root = owner(here)
    person(here, "ana")
    for event in ("resume", "remove"):
        with pytest.raises(IdentityError, match="possible: suspend"):
            here.move(root, "ana", event)
    with pytest.raises(IdentityError, match="there is no account ben"):
        here.move(root, "ben", "suspend")
    with pytest.raises(IdentityError, match="there is an account ana already"):
        person(here, "ana")
    with pytest.raises(logins.PasswordError):
        logins.add(here, root, "ben", "researcher", "short")
    for name in ("", "\ud800", "../ana", "a'; DROP TABLE accounts"):
        with pytest.raises(IdentityError, match="no account of this name"):
            here.move(root, name, "suspend")


def test_the_folders_owner_stays_what_it_is(here):
    eve = person(here, "eve", roles.OWNER)
    with pytest.raises(IdentityError, match="the folder belongs to it"):
        here.move(eve, "root", "suspend")
    with pytest.raises(IdentityError, match="the folder belongs to it"):
        here.set_role(eve, "root", "auditor")
    here.move(owner(here), "eve", "suspend")  # another owner can be


def changes(here):
    """Everything that one account can do to another, or to itself."""
    return {
        "add": lambda by, name: logins.add(
            here, by, f"{name}-2", "researcher", PASSWORD
        ),
        "suspend": lambda by, name: here.move(by, name, "suspend"),
        "resume": lambda by, name: here.move(by, name, "resume"),
        "remove": lambda by, name: here.move(by, name, "remove"),
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
            logins.add(here, by, "friend", role, PASSWORD)
    logins.add(here, by, "ana", "researcher", PASSWORD)
    here.set_limits(by, "ana", Limits(2.0))
    here.move(by, "ana", "suspend")
    with pytest.raises(DeniedError, match=r"account\.role"):
        here.set_role(by, "ana", "auditor")
    assert here.move(by, "ana", "remove").state == "removed"


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
        here.move(ana._replace(role="owner"), "ben", "suspend")
    eve = person(here, "eve", roles.OWNER)
    here.set_role(owner(here), "eve", "auditor")
    with pytest.raises(DeniedError, match=r"eve \(auditor\) may not do"):
        here.move(eve, "ben", "suspend")
    here.move(owner(here), "eve", "suspend")
    with pytest.raises(DeniedError, match="eve may do nothing: it is suspended"):
        here.move(eve, "ben", "suspend")
    with pytest.raises(IdentityError, match="there is no account nobody"):
        here.move(eve._replace(name="nobody"), "ben", "suspend")


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
            assert what in ("resume", "remove") or why.type is OSError
    assert here.listing() == before


def test_limits_are_kept(here):
    person(here, "ana")
    limits = Limits(0.5, 10**9)
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
    assert here.account_of(tokens.owner(here.folder), NOW + 1e9).name == "root"
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
    secrets = [
        PASSWORD,
        "another password",
        login.token,
        tokens.owner(here.folder),
        "hunter2",
    ]
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


def test_each_account_has_a_folder_of_its_own(here, monkeypatch):
    folders = [here.work_folder(person(here, name)) for name in ("ana", "ben")]
    names = [str(each.relative_to(here.folder)) for each in folders]
    assert names == ["users/ana", "users/ben"]
    for each in (*folders, here.folder / "users"):
        assert each.stat().st_mode & 0o777 == 0o700
    ana = here.find("ana")
    assert here.work_folder(ana) == folders[0]
    folders[0].chmod(0o750)
    words = re.escape(f"chmod 700 {folders[0]}")
    with pytest.raises(private_files.PrivateFileError, match=words):
        here.work_folder(ana)
    folders[0].chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(private_files.PrivateFileError, match="run as its owner"):
        here.work_folder(ana)


@pytest.mark.parametrize("where", ["users", "users/ana"])
def test_a_link_in_the_place_of_a_folder_is_refused(here, tmp_path_factory, where):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    path = here.folder / where
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(elsewhere)
    with pytest.raises(private_files.PrivateFileError, match="not a link"):
        here.work_folder(person(here, "ana"))
    assert not list(elsewhere.iterdir())


def test_no_account_has_a_folder_elsewhere_or_when_it_is_suspended(here):
    ana = person(here, "ana")
    for name in ("..", "../ben", "/etc", "", "a/b"):
        with pytest.raises(IdentityError, match="is no account's name"):
            here.work_folder(ana._replace(name=name))
    with pytest.raises(DeniedError, match="it is suspended"):
        here.work_folder(here.move(owner(here), "ana", "suspend"))
    assert not (here.folder / "users" / "ana").exists()


def test_what_has_crossed_is_charged_until_the_quota_is_used_up(here):
    def barred():
        return accounts.barred(here.listing())

    person(here, "ana")
    here.charge("ana", 60)
    here.set_limits(owner(here), "ana", Limits(quota_bytes=100))
    here.charge("ana", 39)
    assert barred() == {}
    here.charge("ana", 1)
    words = "ana: its quota of 100 bytes over the line is used up: get a larger one"
    assert barred() == {"ana": words}
    here.set_limits(owner(here), "ana", Limits(quota_bytes=101))
    assert barred() == {}
    here.move(owner(here), "ana", "suspend")
    here.charge("ana", 10**12)  # it has crossed, whatever the account is
    assert here.find("ana").charged_bytes == 10**12 + 100
    assert barred() == {"ana": "ana may do nothing: it is suspended"}
    with pytest.raises(IdentityError, match="no account nobody"):
        here.charge("nobody", 1)


def test_who_charges_side_by_side_loses_no_byte(here):
    person(here, "ana")
    stores = [reopen(here.folder) for _ in range(4)]

    def spend(each):
        for _ in range(25):
            each.charge("ana", 7)
        each.close()

    threads = [threading.Thread(target=spend, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert here.find("ana").charged_bytes == 4 * 25 * 7
