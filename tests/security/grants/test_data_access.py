"""Handles: what others see of a corpus, and what nobody but its owner does."""

import json

import pytest
import tiny_accounts
from tiny_accounts import MOCK, NOW, PATH, SCHEMA, begin, handle, owner, person

from nebula_jax.security import grants
from nebula_jax.security.accounts import IdentityError, roles
from nebula_jax.security.accounts.roles import DeniedError
from nebula_jax.security.grants import data_access, data_requests, data_schema
from nebula_jax.security.grants.budgets import Budget
from nebula_jax.security.grants.data_access import DataAccess, DataError
from nebula_jax.security.grants.data_requests import Requests

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
    return DataAccess(here.store)


def test_everybody_sees_form_and_sample_and_nobody_the_path(here, data):
    ana = person(here, "ana")
    made = data.register(ana, "corpus-es", {"path": PATH}, SCHEMA, MOCK, NOW)
    assert made == ("corpus-es", "ana", SCHEMA, "open", NOW)
    assert data.handles() == [data.find("corpus-es")] == [made]
    assert data.mock("corpus-es") == MOCK
    public = [made, data.handles(), data.mock("corpus-es"), data._store.record]
    assert PATH not in repr(public)
    assert data.provider(ana, "corpus-es") == {"path": PATH}
    assert data.provider(owner(here), "corpus-es") == {"path": PATH}


def test_only_its_owner_and_the_labs_get_at_what_is_behind_a_handle(here, data):
    handle(here, owner(here))
    grants.Grants(here.store)
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
    tiny_accounts.grant(here, owner(here), "ana", Budget(10))
    with pytest.raises(DeniedError):
        data.provider(here.find("ana"), "corpus-es")


def test_no_path_is_a_handle(here, data):
    root, requests = owner(here), Requests(here.store)
    for call in (
        lambda name: data.register(root, name, {}, SCHEMA, MOCK, NOW),
        data.find,
        data.mock,
        lambda name: data.provider(root, name),
        lambda name: requests.keep("root", name, ["rows"], "", NOW),
    ):
        for name in BAD_NAMES:
            with pytest.raises(DataError, match="is no handle's name") as why:
                call(name)
            assert str(why.value).isprintable()


def test_handles(here, data):
    for name in ["corpus-es", "a", "0", "a" * 64, "2019-news"]:
        handle(here, owner(here), name)
        assert data.find(name).name == name


def test_a_name_is_given_once(here, data):
    root, ana = owner(here), person(here, "ana")
    handle(here, root)
    data.withdraw(root, "corpus-es")
    with pytest.raises(DataError, match="there is a handle corpus-es already, or"):
        handle(here, ana)
    with pytest.raises(DataError, match="there is no handle corpus-de"):
        data.find("corpus-de")
    with pytest.raises(DataError, match="withdrawn"):
        data.provider(root, "corpus-es")


def test_what_cannot_be_registered(here, data):
    root = owner(here)
    for provider in ({"a": object()}, {"a": float("nan")}, {"a": "b" * 2**16}):
        with pytest.raises(DataError, match="the settings of a provider"):
            data.register(root, "a", provider, SCHEMA, MOCK, NOW)
    with pytest.raises(data_schema.SchemaError, match="label is no int32"):
        data.register(root, "a", {}, SCHEMA, [{"input_ids": [], "label": ""}], NOW)
    schema = SCHEMA._replace(vocabulary=PATH)
    with pytest.raises(data_schema.SchemaError, match="64 hexadecimal"):
        data.register(root, "a", {}, schema, MOCK, NOW)
    for role in ("operator", "auditor"):
        with pytest.raises(DeniedError, match=r"data\.register"):
            handle(here, person(here, role, role))
    assert data.handles() == []


def test_operations_are_a_short_list():
    assert data_access.operations_of(["rows", "schema", "rows"]) == ("schema", "rows")
    for names in (["write"], ["rows", "path"], ["\x1b"], [""]):
        with pytest.raises(DataError, match="is no operation on data: those are"):
            data_access.operations_of(names)
    with pytest.raises(DataError, match="name an operation: schema, lengths, rows"):
        data_access.operations_of([])


def test_a_request_is_kept_once_and_decided_by_the_owner(here):
    kept = Requests(here.store)
    ana, ben = person(here, "ana"), person(here, "ben")
    handle(here, ana)
    record = here.store.record = tiny_accounts.Records()
    made = kept.keep("ben", "corpus-es", ["rows"], "for my\nthesis\x1b", NOW)
    again = kept.keep("ben", "corpus-es", ["rows"], "please", NOW + 1)
    assert again == made
    assert made == (
        *(1, "ben", "corpus-es", ("rows",), "for my\ufffdthesis\ufffd"),
        *("requested", NOW),
    )
    more = kept.keep("ben@lab-s", "corpus-es", ["rows", "lengths"], "", NOW)
    with pytest.raises(DeniedError):
        kept.refuse(ben, made.number)
    assert kept.refuse(ana, made.number).state == "refused"
    with pytest.raises(DataError, match="request 1 is refused already"):
        kept.refuse(ana, made.number)
    for number in (9, 10**22, -(10**22)):
        with pytest.raises(DataError, match=f"there is no request {number}"):
            kept.refuse(ana, number)
    tiny_accounts.grant(here, ana, "ben@lab-s", Budget(5))
    assert kept.listing("requested") == [more]  # it is for more than was granted
    tiny_accounts.grant(here, ana, "ben@lab-s", Budget(5), ["lengths", "rows"])
    assert [each.state for each in kept.listing()] == ["refused", "granted"]
    kinds = [kind for kind, _, _ in record if kind.startswith("data")]
    assert kinds == ["data.request", "data.request", "data.refuse"]


def test_who_may_request(here):
    kept = Requests(here.store)
    handle(here, owner(here))
    person(here, "ana")
    person(here, "eve", roles.AUDITOR)
    for subject, error in {
        "nobody": IdentityError,
        "eve": DeniedError,
        "ana@": IdentityError,
        "../ana": IdentityError,
    }.items():
        with pytest.raises(error):
            kept.keep(subject, "corpus-es", ["rows"], "", NOW)
    here.move(owner(here), "ana", "suspend")
    with pytest.raises(DeniedError, match="suspended"):
        kept.keep("ana", "corpus-es", ["rows"], "", NOW)
    with pytest.raises(DataError, match="there is no handle corpus-de"):
        kept.keep("root", "corpus-de", ["rows"], "", NOW)
    DataAccess(here.store).withdraw(owner(here), "corpus-es")
    with pytest.raises(DataError, match="was withdrawn"):
        kept.keep("root", "corpus-es", ["rows"], "", NOW)


def test_a_lab_cannot_fill_the_disk_with_requests(here, monkeypatch):
    monkeypatch.setattr(data_requests, "MOST_REQUESTS", 3)
    kept = Requests(here.store)
    handle(here, owner(here))
    for number in range(3):
        kept.keep(f"a{number}@lab-s", "corpus-es", ["rows"], "a" * 10**5, NOW)
    with pytest.raises(DataError, match="3 requests of lab-s are open"):
        kept.keep("b@lab-s", "corpus-es", ["rows"], "", NOW)
    kept.keep("b@lab-t", "corpus-es", ["rows"], "", NOW)
    assert len(json.dumps(kept.listing())) < 4000
