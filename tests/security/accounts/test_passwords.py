"""Which passwords are taken, and what checking one costs."""

import threading
import time
import unicodedata

import argon2
import pytest
import tiny_accounts

from nebula_jax.security.accounts import passwords
from nebula_jax.security.accounts.passwords import PasswordError


@pytest.mark.parametrize(
    "password",
    ["a" * 12, "a" * 1024, "é" * 512, "пароль-на-русском", "🐘" * 12, " " * 12],
)
def test_any_text_of_some_length(password):
    assert passwords.new(password) == password


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
        passwords.new(password)
    assert not password or password not in str(why.value)


def test_two_ways_to_type_an_accent_are_one_password():
    composed = "contraseña-añeja"
    typed = unicodedata.normalize("NFD", composed)
    assert typed != composed
    hasher = tiny_accounts.Hasher()
    stored = passwords.hashed(hasher, passwords.new(composed))
    assert passwords.is_right(hasher, stored, passwords.normal(typed))


def test_the_real_hasher_is_argon2id_with_the_parameters_of_rfc_9106():
    hasher = passwords.argon2id()
    stored = passwords.hashed(hasher, tiny_accounts.PASSWORD)
    assert stored.startswith("$argon2id$v=19$m=65536,t=3,p=4$")
    assert passwords.is_right(hasher, stored, tiny_accounts.PASSWORD)


def test_each_check_is_one_hash_whatever_is_wrong():
    hasher = tiny_accounts.Hasher()
    stored = passwords.hashed(hasher, tiny_accounts.PASSWORD)
    for hashed, password, right in [
        (stored, tiny_accounts.PASSWORD, True),
        (stored, "another password", False),
        (None, tiny_accounts.PASSWORD, False),
        (None, "", False),
    ]:
        before = hasher.calls
        assert passwords.is_right(hasher, hashed, password) is right
        assert hasher.calls == before + 1


@pytest.mark.parametrize("stored", ["$argon2id$", "junk", ""])
def test_a_damaged_hash_is_no_wrong_password(stored):
    with pytest.raises(PasswordError, match="cannot be checked at present"):
        passwords.is_right(tiny_accounts.Hasher(), stored, "any")


class Slow(tiny_accounts.Hasher):
    """Counts how many hash at a time."""

    def __init__(self):
        super().__init__()
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def hash(self, password):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self.lock:
            self.now -= 1
        return super().hash(password)


def test_few_hash_at_a_time():
    hasher = Slow()
    threads = [
        threading.Thread(target=passwords.hashed, args=(hasher, "a")) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (hasher.calls, hasher.most) == (12, passwords.AT_ONCE)


def test_whoever_waits_too_long_for_a_turn_is_sent_away(monkeypatch):
    monkeypatch.setattr(passwords, "LONGEST_WAIT", 0.01)
    hasher, turns = tiny_accounts.Hasher(), passwords._turns
    for _ in range(passwords.AT_ONCE):
        assert turns.acquire(timeout=10)
    try:
        with pytest.raises(PasswordError, match="try again soon"):
            passwords.hashed(hasher, "a")
    finally:
        for _ in range(passwords.AT_ONCE):
            turns.release()
    passwords.hashed(hasher, "a")


class Failing(tiny_accounts.Hasher):
    def hash(self, password):
        raise argon2.exceptions.HashingError("Memory allocation error")

    def verify(self, stored, password):
        raise argon2.exceptions.VerificationError("Memory allocation error")


@pytest.mark.parametrize("stored", [None, "$argon2id$"])
def test_no_memory_is_no_wrong_password(stored):
    for _ in range(passwords.AT_ONCE + 1):  # a turn is given back each time
        with pytest.raises(PasswordError, match=r"argon2id failed \(Memory"):
            passwords.is_right(Failing(), stored, "any")
