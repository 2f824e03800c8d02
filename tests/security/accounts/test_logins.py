"""Passwords and logging in: what is right, what is wrong alike, and 10,000 tries."""

import statistics
import threading
import time
import unicodedata

import argon2
import pytest
import tiny_accounts
from tiny_accounts import NOW, PASSWORD, begin, owner, person, reopen

from nebula_jax.security.accounts import IdentityError, identity, logins, roles, tokens
from nebula_jax.security.accounts import store as store_lib
from nebula_jax.security.accounts.logins import (
    LoginError,
    PasswordError,
    ThrottledError,
)
from nebula_jax.security.accounts.roles import DeniedError

NEW = "a password of another year"
WRONG = "no account has this name and password"


@pytest.fixture
def here(tmp_path):
    with begin(tmp_path, record=tiny_accounts.Records()) as here:
        person(here, "ana")
        yield here


def attempt(here, name, password, now=NOW):
    """The error of a try; hashes that it took."""
    before = here.hasher.calls
    with pytest.raises(LoginError) as why:
        logins.login(here, name, password, now)
    assert password not in str(why.value)
    return why.value, here.hasher.calls - before


def test_name_and_password_give_a_token(here):
    login = logins.login(here, "ana", PASSWORD, NOW, lifetime=60)
    assert here.account_of(login.token, NOW + 59) == login.account == here.find("ana")
    other = logins.login(here, "ana", PASSWORD, NOW)
    assert other.token != login.token
    assert here.account_of(login.token, NOW) == here.account_of(other.token, NOW)
    logins.logout(here, login.token)
    logins.logout(here, login.token)
    with pytest.raises(tokens.TokenError, match="revoked"):
        here.account_of(login.token, NOW)
    here.account_of(other.token, NOW)


def test_whatever_is_wrong_the_answer_and_the_work_are_the_same(here):
    person(here, "eve")
    here.move(owner(here), "eve", "suspend")
    here.move(owner(here), "eve", "remove")
    names = ["ana", "eve", "nobody", "root", "", "\ud800", "../x", "a" * 10**5]
    for name in names:
        error, hashes = attempt(here, name, "a wrong password")
        assert (str(error), hashes) == (WRONG, 1)
    for name in ("eve", "root"):
        error, hashes = attempt(here, name, PASSWORD)
        assert (str(error), hashes) == (WRONG, 1)
    for password in ("a" * 1025, "\ud800" * 12):  # nobody's, whoever tries
        for name in names:
            assert str(attempt(here, name, password)[0]) == WRONG


def test_an_unknown_name_takes_as_long_as_a_wrong_password(tmp_path):
    with begin(tmp_path, hasher=tiny_accounts.Hasher(2, 2048)) as here:
        person(here, "ana")
        taken = {"ana": [], "nobody": []}
        for number in range(15):
            for name, times in taken.items():
                start = time.process_time()
                attempt(here, name, "a wrong password", NOW + 1000 * number)
                times.append(time.process_time() - start)
    wrong, unknown = map(statistics.median, taken.values())
    assert 0.5 < unknown / wrong < 2  # coarse: this machine has other work


def test_who_has_the_password_of_a_suspended_account_learns_that_it_is(here):
    here.move(owner(here), "ana", "suspend")
    assert str(attempt(here, "ana", PASSWORD)[0]) == "account ana is suspended"
    assert str(attempt(here, "ana", "a wrong password")[0]) == WRONG


def test_ten_thousand_tries_at_once_check_five_passwords(here):
    hashes = sum(attempt(here, "ana", f"{n:012}")[1] for n in range(9_999))
    assert hashes == logins.FREE == 5
    error, hashes = attempt(here, "ana", PASSWORD)  # the right one, too early
    assert isinstance(error, ThrottledError)
    assert hashes == 0
    assert str(error) == "too many tries to log in have failed: try again in 1 s"
    assert logins.login(here, "ana", PASSWORD, NOW + 1).account.name == "ana"
    assert not isinstance(attempt(here, "ana", "wrong")[0], ThrottledError)  # anew


def test_ten_thousand_tries_take_months():
    seconds = sum(map(logins.wait, range(10_000)))
    assert seconds > 100 * 24 * 3600
    waits = [logins.wait(n) for n in (0, 4, 5, 6, 14, 15, 10**6)]
    assert waits == [0, 0, 1, 2, 512, 900, 900]


def test_tries_of_a_name_that_nobody_has_are_slowed_down_alike(here):
    found = [attempt(here, "nobody", f"{n:012}") for n in range(20)]
    assert sum(hashes for _, hashes in found) == 5
    assert [isinstance(error, ThrottledError) for error, _ in found].count(True) == 15
    known = [attempt(here, "ana", f"{n:012}") for n in range(20)]
    assert [(str(e), n) for e, n in known] == [(str(e), n) for e, n in found]


def test_names_that_nobody_has_leave_a_small_table(here, monkeypatch):
    monkeypatch.setattr(logins, "BUCKETS", 8)
    for number in range(100):
        attempt(here, f"nobody-{number}", "a wrong password")
    assert here.store.rows("SELECT count(*) FROM tries")[0][0] <= 8
    logins.login(here, "ana", PASSWORD, NOW)  # accounts are counted apart


def test_the_count_outlives_the_process(here):
    for _ in range(5):
        attempt(here, "ana", "a wrong password")
    with reopen(here.folder) as again:
        assert isinstance(attempt(again, "ana", PASSWORD)[0], ThrottledError)


def test_tries_side_by_side_are_counted_one_by_one(here):
    stores = [reopen(here.folder, hasher=here.hasher) for _ in range(4)]
    before, errors = here.hasher.calls, []

    def guess(store):
        for number in range(5):
            try:
                logins.login(store, "ana", f"{number:012}", NOW)
            except LoginError as error:
                errors.append(error)

    threads = [threading.Thread(target=guess, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in stores:
        each.close()
    assert len(errors) == 20
    assert here.hasher.calls - before == 5


def test_a_clock_that_is_set_back_locks_nobody_out_for_years(here):
    for number in range(15):
        attempt(here, "ana", "a wrong password", NOW + 1e8 + 1000 * number)
    error, hashes = attempt(here, "ana", "a wrong password", NOW)
    assert (str(error), hashes) == (WRONG, 1)
    words = "try again in 899 s"  # the count of failures has stayed
    with pytest.raises(ThrottledError, match=words):
        logins.login(here, "ana", PASSWORD, NOW + 1)
    logins.login(here, "ana", PASSWORD, NOW + logins.LONGEST)


def test_a_new_password_revokes_the_tokens_and_ends_the_old_one(here):
    ana = here.find("ana")
    token = logins.login(here, "ana", PASSWORD, NOW).token
    logins.set_password(here, ana, "ana", NEW, NOW, old=PASSWORD)
    with pytest.raises(tokens.TokenError, match="revoked"):
        here.account_of(token, NOW)
    assert str(attempt(here, "ana", PASSWORD)[0]) == WRONG
    logins.login(here, "ana", NEW, NOW)
    assert ("account.password", "ana", {"name": "ana"}) in here.store.record


def test_a_token_alone_does_not_change_its_password(here):
    ana = here.find("ana")
    for old in ("", "a wrong password"):
        with pytest.raises(LoginError, match=WRONG):
            logins.set_password(here, ana, "ana", NEW, NOW, old=old)
    for _ in range(5):
        with pytest.raises(LoginError):
            logins.set_password(here, ana, "ana", NEW, NOW, old="wrong")
    with pytest.raises(ThrottledError):
        logins.set_password(here, ana, "ana", NEW, NOW, old=PASSWORD)


def test_whose_password_an_account_may_set(here):
    ops, ben = person(here, "ops", roles.OPERATOR), person(here, "ben")
    logins.set_password(here, ops, "ana", NEW, NOW)
    logins.login(here, "ana", NEW, NOW)
    for by, name in ((ben, "ana"), (ops, "root"), (here.find("ana"), "ops")):
        before = here.hasher.calls
        with pytest.raises(DeniedError, match=r"account\.password"):
            logins.set_password(here, by, name, NEW, NOW)
        assert here.hasher.calls == before  # denied before any work
    with pytest.raises(PasswordError):
        logins.set_password(here, ops, "ana", "short", NOW)
    with pytest.raises(IdentityError, match="there is no account nobody"):
        logins.set_password(here, ops, "nobody", NEW, NOW)
    here.move(ops, "ana", "suspend")
    here.move(ops, "ana", "remove")
    with pytest.raises(IdentityError, match="ana is removed"):
        logins.set_password(here, ops, "ana", NEW, NOW)


def test_the_folders_owner_gets_a_new_token_with_a_new_password(here):
    before = tokens.owner(here.folder)
    logins.set_password(here, owner(here), "root", NEW, NOW)
    with pytest.raises(tokens.TokenError):
        here.account_of(before, NOW)
    assert owner(here).name == "root"
    logins.login(here, "root", NEW, NOW)
    with pytest.raises(LoginError):  # it has one now, which a token cannot change
        logins.set_password(here, owner(here), "root", PASSWORD, NOW)


def test_a_password_that_changes_during_a_login_gives_no_token(here):
    class Interrupted(tiny_accounts.Hasher):
        def verify(self, stored, password):
            ops = owner(here)
            logins.set_password(here, ops, "ana", NEW, NOW)
            return super().verify(stored, password)

    other = reopen(here.folder, hasher=Interrupted())
    with pytest.raises(LoginError, match=WRONG):
        logins.login(other, "ana", PASSWORD, NOW)
    other.close()
    query = "SELECT count(*) FROM tokens WHERE account = 'ana'"
    assert here.store.rows(query)[0][0] == 0


def test_a_login_that_cannot_be_recorded_gives_no_token(here):
    def full(kind, who, **what):
        raise OSError("no space left for the audit log")

    other = reopen(here.folder, record=full)
    with pytest.raises(OSError, match="audit log"):
        logins.login(other, "ana", PASSWORD, NOW)
    other.close()
    query = "SELECT count(*) FROM tokens WHERE account = 'ana'"
    assert here.store.rows(query)[0][0] == 0


def test_failures_are_recorded_and_names_that_nobody_has_are_not(here):
    attempt(here, "ana", "a wrong password")
    attempt(here, "my-password-typed-early", "a wrong password")
    refused = [
        (who, what) for kind, who, what in here.store.record if "refused" in kind
    ]
    assert refused == [("ana", {}), ("", {})]
    assert store_lib.unrecorded("login", "ana", at=1) is None


@pytest.mark.parametrize(
    "password",
    ["a" * 12, "a" * 1024, "é" * 512, "пароль-на-русском", "🐘" * 12, " " * 12],
)
def test_any_text_of_some_length(password):
    assert logins.checked(password) == password


@pytest.mark.parametrize(
    ("password", "words"),
    [
        ("", "at least 12 characters, this one 0"),
        ("a" * 11, "at least 12 characters, this one 11"),
        ("e\u0301" * 11, "at least 12 characters, this one 11"),
        ("a" * 1025, "at most 1024 bytes"),
        ("é" * 513, "at most 1024 bytes, this one 1026"),
        ("🐘" * 10**7, "at most 1024 bytes"),
        ("\ud800" * 12, "text in UTF-8"),
    ],
)
def test_too_short_too_long_or_no_text(password, words):
    with pytest.raises(PasswordError, match=words) as why:
        logins.checked(password)
    assert not password or password not in str(why.value)


def test_two_ways_to_type_an_accent_are_one_password(here):
    composed = "contraseña-añeja"
    typed = unicodedata.normalize("NFD", composed)
    assert typed != composed
    logins.set_password(here, owner(here), "ana", composed, NOW)
    logins.login(here, "ana", typed, NOW)


def test_real_passwords_are_hashed_by_argon2id_with_the_parameters_of_rfc_9106(here):
    with identity.Identity.open(here.folder) as real:
        logins.set_password(real, owner(here), "ana", NEW, NOW)
        logins.login(real, "ana", NEW, NOW)
    stored = here.store.rows("SELECT password FROM accounts WHERE name = 'ana'")[0][0]
    assert stored.startswith("$argon2id$v=19$m=65536,t=3,p=4$")


@pytest.mark.parametrize("stored", ["$argon2id$", "junk", ""])
def test_a_damaged_hash_is_no_wrong_password(here, stored):
    with here.store.writing() as connection:
        connection.execute("UPDATE accounts SET password = ?", (stored,))
    with pytest.raises(PasswordError, match="cannot be checked at present"):
        logins.login(here, "ana", PASSWORD, NOW)


@pytest.mark.parametrize("name", ["ana", "nobody"])
def test_no_memory_is_no_wrong_password(here, name):
    class Failing(tiny_accounts.Hasher):
        def hash(self, password):
            raise argon2.exceptions.HashingError("Memory allocation error")

        def verify(self, stored, password):
            raise argon2.exceptions.VerificationError("Memory allocation error")

    here.hasher = Failing()
    with pytest.raises(PasswordError, match=r"argon2id failed \(Memory"):
        logins.login(here, name, PASSWORD, NOW)
