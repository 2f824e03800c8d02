"""The part of a lab that an account has for itself."""

import os
import re
import threading

import pytest
from tiny_accounts import begin, owner, person, reopen

from nebula_jax.security.accounts import IdentityError, Limits, QuotaError, isolation
from nebula_jax.security.accounts.roles import DeniedError
from nebula_jax.security.private_files import PrivateFileError


@pytest.fixture
def here(tmp_path):
    with begin(tmp_path) as here:
        person(here, "ana")
        yield here


def test_each_account_has_a_folder_of_its_own(here):
    person(here, "ben")
    folders = [isolation.work_folder(here.folder, each) for each in here.listing()]
    names = [str(each.relative_to(here.folder)) for each in folders]
    assert names == ["users/ana", "users/ben", "users/root"]
    for each in (*folders, here.folder / "users"):
        assert each.stat().st_mode & 0o777 == 0o700
    assert isolation.work_folder(here.folder, here.find("ana")) == folders[0]


@pytest.mark.parametrize("where", ["users", "users/ana"])
def test_a_link_in_the_place_of_a_folder_is_refused(here, tmp_path_factory, where):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    path = here.folder / where
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(elsewhere)
    with pytest.raises(PrivateFileError, match="not a link"):
        isolation.work_folder(here.folder, here.find("ana"))
    assert not list(elsewhere.iterdir())


def test_a_folder_of_another_user_or_open_to_one_is_refused(here, monkeypatch):
    ana = here.find("ana")
    path = isolation.work_folder(here.folder, ana)
    path.chmod(0o750)
    with pytest.raises(PrivateFileError, match=re.escape(f"chmod 700 {path}")):
        isolation.work_folder(here.folder, ana)
    path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PrivateFileError, match="run as its owner"):
        isolation.work_folder(here.folder, ana)


def test_no_account_has_a_folder_elsewhere_or_when_it_is_suspended(here):
    ana = here.find("ana")
    for name in ("..", "../ben", "/etc", "", "a/b"):
        with pytest.raises(IdentityError, match="is no account's name"):
            isolation.work_folder(here.folder, ana._replace(name=name))
    with pytest.raises(DeniedError, match="it is suspended"):
        isolation.work_folder(here.folder, here.suspend(owner(here), "ana"))
    assert not (here.folder / "users" / "ana").exists()


def test_the_disk_that_an_account_uses(here, tmp_path_factory):
    ana = here.find("ana")
    assert isolation.disk_used(here.folder, ana) == 0
    folder = isolation.work_folder(here.folder, ana)
    outside = tmp_path_factory.mktemp("outside")
    (outside / "large").write_bytes(bytes(10**6))
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "file").write_bytes(bytes(1000))
    os.link(folder / "deep" / "er" / "file", folder / "second-name")
    (folder / "link").symlink_to(outside / "large")
    (folder / "folder").symlink_to(outside)
    (folder / "other").write_bytes(bytes(234))
    assert isolation.disk_used(here.folder, ana) == 1234
    isolation.check_disk(here.folder, ana, 10**9)
    limited = here.set_limits(owner(here), "ana", Limits(disk_bytes=1300))
    isolation.check_disk(here.folder, limited, 66)
    words = "1234 of 1300 bytes are used, so 67 more do not fit: remove files"
    with pytest.raises(QuotaError, match=words):
        isolation.check_disk(here.folder, limited, 67)


def test_the_disk_of_a_link_is_not_counted(here, tmp_path_factory):
    (here.folder / "users").mkdir(mode=0o700)
    (here.folder / "users" / "ana").symlink_to(tmp_path_factory.mktemp("outside"))
    with pytest.raises(PrivateFileError, match="not a link"):
        isolation.disk_used(here.folder, here.find("ana"))


def test_what_has_crossed_is_charged_whatever_the_quota_is(here):
    isolation.charge(here.store, "ana", 60)
    here.set_limits(owner(here), "ana", Limits(quota_bytes=100))
    isolation.check_quota(here.find("ana"))
    isolation.charge(here.store, "ana", 41)
    assert here.find("ana").charged_bytes == 101
    here.suspend(owner(here), "ana")
    isolation.charge(here.store, "ana", 10**12)
    assert here.find("ana").charged_bytes == 10**12 + 101
    for count in (-1, 2**51):
        with pytest.raises(QuotaError, match="cannot be charged"):
            isolation.charge(here.store, "ana", count)
    with pytest.raises(IdentityError, match="no account nobody"):
        isolation.charge(here.store, "nobody", 1)


def test_who_has_used_up_its_quota_or_is_not_active_is_barred(here):
    def barred():
        return isolation.barred(here.listing())

    assert barred() == {}
    here.set_limits(owner(here), "ana", Limits(quota_bytes=100))
    isolation.charge(here.store, "ana", 99)
    assert barred() == {}
    isolation.charge(here.store, "ana", 1)
    words = "ana: its quota of 100 bytes over the line is used up: get a larger one"
    assert barred() == {"ana": words}
    with pytest.raises(QuotaError, match=words):
        isolation.check_quota(here.find("ana"))
    here.set_limits(owner(here), "ana", Limits(quota_bytes=101))
    assert barred() == {}
    here.suspend(owner(here), "ana")
    assert barred() == {"ana": "ana may do nothing: it is suspended"}
    here.resume(owner(here), "ana")
    assert barred() == {}
    here.add(owner(here), "bea", "researcher", 0.0)  # she activates it when she likes
    assert barred() == {}


def test_who_charges_side_by_side_loses_no_byte(here):
    stores = [reopen(here.folder) for _ in range(4)]

    def spend(each):
        for _ in range(25):
            isolation.charge(each.store, "ana", 7)
        each.close()

    threads = [threading.Thread(target=spend, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert here.find("ana").charged_bytes == 4 * 25 * 7
