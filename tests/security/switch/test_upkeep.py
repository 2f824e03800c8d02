"""Accounts are charged with all that has crossed, and barred while they have to be."""

import contextlib

import pytest
import tiny_accounts
import two_labs

from nebula_jax.security import accounts, identity_store, isolation
from nebula_jax.security.switch import state, upkeep, usage


@pytest.fixture
def folder(tmp_path):
    made = two_labs.found(tmp_path)
    with tiny_accounts.reopen(tmp_path) as here:
        tiny_accounts.person(here, "ana")
    return made


@pytest.fixture
def kept(folder):
    made = upkeep.Upkeep(state.State(folder, print))
    yield made
    made.close()


def limit(kept, quota):
    here = kept.state.identity
    limits = accounts.Limits(quota_bytes=quota)
    here.set_limits(tiny_accounts.owner(here), "ana", limits)


def charged(kept):
    return kept.state.identity.find("ana").charged_bytes


def test_an_overrun_is_charged_and_a_larger_quota_ends_the_bar(kept):
    limit(kept, 1000)
    kept.state.usage.count("m3", "ana", 2000)
    kept.charge()
    assert charged(kept) == 2000
    with pytest.raises(usage.QuotaSpent, match="its quota of 1000 bytes"):
        kept.state.usage.count("m3", "ana", 1)
    kept.charge()
    assert charged(kept) == 2000
    limit(kept, 3000)
    kept.charge()
    kept.state.usage.count("m3", "ana", 500)
    kept.charge()
    assert charged(kept) == 2500


def test_a_restart_gives_a_spent_account_nothing_more(kept, folder):
    limit(kept, 1000)
    kept.state.usage.count("m3", "ana", 2000)
    kept.charge()
    again = state.State(folder, print)
    with (
        again.identity,
        contextlib.closing(again.audit),
        pytest.raises(usage.QuotaSpent, match="its quota of 1000 bytes"),
    ):
        again.usage.check("ana")


def test_an_account_that_is_active_again_is_barred_no_more(kept):
    here = kept.state.identity
    kept.state.usage.count("m3", "ana", 2000)
    here.suspend(tiny_accounts.owner(here), "ana")
    kept.charge()
    with pytest.raises(usage.QuotaSpent, match="it is suspended"):
        kept.state.usage.check("ana")
    here.resume(tiny_accounts.owner(here), "ana")
    kept.charge()
    kept.state.usage.check("ana")
    assert charged(kept) == 2000


def test_what_could_not_be_charged_is_charged_later(kept, monkeypatch):
    def full(store, name, count):
        raise identity_store.StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(isolation, "charge", full)
        kept.state.usage.count("m3", "ana", 2000)
        kept.charge()
    assert charged(kept) == 0
    with pytest.raises(usage.QuotaSpent, match="the disk is full"):
        kept.state.usage.count("m3", "ana", 1)
    kept.charge()
    kept.state.usage.count("m3", "ana", 1)
    kept.charge()
    assert charged(kept) == 2001
