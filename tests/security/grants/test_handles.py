"""Handles: what others see of a corpus, and what nobody but its owner does."""

import pytest
import tiny_accounts
from tiny_accounts import PATH, begin, handle, owner, person

from nebula_jax.security import grants
from nebula_jax.security.accounts import roles
from nebula_jax.security.accounts.roles import DeniedError
from nebula_jax.security.grants.handles import DataError, Handles

BAD_NAMES = [
    *("", ".", "..", "../corpus", "/data/es", "a/b", "a\\b", "a.b", "C:", "corpus es"),
    *("/dev/zero", "corpus\x00", "corpus\n", "-a", "Corpus", "é", "a" * 65, "\ud800"),
    *("~", "*", "corpus%2f..", "handle:corpus", "'--"),
]


@pytest.fixture
def here(tmp_path):
    with begin(tmp_path) as here:
        yield here


@pytest.fixture
def data(here):
    here.store.record = tiny_accounts.Records()
    return Handles(here.store)


def test_everybody_sees_what_a_handle_says_and_nobody_the_path(here, data):
    ana = person(here, "ana")
    made = handle(here, ana)
    assert made == ("corpus-es", "ana", 1000, "ab" * 32, "News, 2019.", "open")
    assert data.listing() == [data.find("corpus-es")] == [made]
    assert PATH not in repr([made, data.listing(), here.store.record])
    assert data.provider(ana, "corpus-es") == {"path": PATH}
    assert data.provider(owner(here), "corpus-es") == {"path": PATH}


def test_only_its_owner_and_the_labs_get_at_what_is_behind_a_handle(here, data):
    handle(here, owner(here))
    for name, role in (("ana", roles.RESEARCHER), ("ops", roles.OPERATOR)):
        by = person(here, name, role)
        with pytest.raises(DeniedError, match=r"data\.serve") as why:
            data.provider(by, "corpus-es")
        assert PATH not in str(why.value)
        with pytest.raises(DeniedError):
            data.withdraw(by, "corpus-es")
        forged = by._replace(role="owner")
        with pytest.raises(DeniedError):
            data.provider(forged, "corpus-es")
    # A grant is for what the provider serves, not for where it is.
    tiny_accounts.grant(here, owner(here), "ana", grants.Budget(10))
    with pytest.raises(DeniedError):
        data.provider(here.find("ana"), "corpus-es")
    for role in ("operator", "auditor"):
        with pytest.raises(DeniedError, match=r"data\.register"):
            handle(here, person(here, role, role), "other")


def test_no_path_is_a_handle(here, data):
    root = owner(here)
    for call in (
        lambda name: handle(here, root, name),
        data.find,
        lambda name: data.provider(root, name),
    ):
        for name in BAD_NAMES:
            with pytest.raises(DataError, match="is no handle's name") as why:
                call(name)
            assert str(why.value).isprintable()
    for name in ["corpus-es", "a", "0", "a" * 64, "2019-news"]:
        handle(here, owner(here), name)
        assert data.find(name).name == name


def test_a_name_is_given_once(here, data):
    root, ana = owner(here), person(here, "ana")
    handle(here, root)
    assert data.withdraw(root, "corpus-es").state == "withdrawn"
    with pytest.raises(DataError, match="there is a handle corpus-es already, or"):
        handle(here, ana)
    with pytest.raises(DataError, match="there is no handle corpus-de"):
        data.find("corpus-de")
    with pytest.raises(DataError, match="withdrawn"):
        data.provider(root, "corpus-es")
