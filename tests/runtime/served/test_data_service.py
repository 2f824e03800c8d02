"""Data that a lab serves: the same rows as from its folder, to those with a grant."""

import json
import threading
import time
import types

import host_users
import numpy as np
import pytest
import served_corpus
import tiny_accounts
from served_corpus import HANDLE, LENGTH
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication.wire import frames
from nebula_jax.data import language_mixture, packed_sequences, resumable_batches
from nebula_jax.runtime import connect
from nebula_jax.runtime.served import data_channels, data_service, remote_text
from nebula_jax.security import grants
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.membership import site_folder

ROWS = 4
GROUP = ["en", "de"]
MIX = {"mrtd": 0.5, "trtd": 0.5}
US = "owner@lab-t"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return served_corpus.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def owner(labs, corpus):
    """lab-s, which has the corpus."""
    return served_corpus.Owner(labs.s, *corpus, corpus[1].path)


@pytest.fixture(scope="module")
def clock():
    """The seconds that the service's clock is ahead."""
    return {"ahead": 0.0}


@pytest.fixture(scope="module")
def served(owner, clock):
    """The lines that the service logs."""
    with owner.serving(clock=lambda: time.time() + clock["ahead"]) as lines:
        yield lines


@pytest.fixture
def read(labs, served, corpus):
    """Reads the corpus, as a cluster of lab-t or another does."""

    def made(lab="t", cluster="generator:0", at="", length=LENGTH, **more):
        settings = {"federation": str(getattr(labs, lab).folder.path), "job": "m3"}
        return remote_text.RemoteText(
            connect.Settings(**settings | {"connect_timeout": 20.0} | more),
            data_channels.Wanted(HANDLE, at),
            cluster,
            corpus[1].digest,
            data_channels.Form(ROWS, length, corpus[1].size),
        )

    return made


def local_text(corpus, folder):
    return language_mixture.open_generator(
        corpus[0],
        GROUP,
        MIX,
        language_mixture.SamplingExponents(),
        vocabulary=corpus[1],
        max_length=LENGTH,
        prepared_dir=folder,
    )


def mixed(text):
    def opened(kind, language, splits):
        return packed_sequences.Prepared(*text.part(f"{kind}/{language}", splits))

    exponents = language_mixture.SamplingExponents()
    return language_mixture.mixture(GROUP, MIX, exponents, opened)


def batches(data, **more):
    numbered = resumable_batches.numbered(data.sources, 6, LENGTH, 3, **more)
    return resumable_batches.training_batches(numbered)


def held_out(sequences):
    return resumable_batches.held_out_batches(sequences, 2, 5, LENGTH)


def test_batches_by_handle_are_those_of_the_folder(owner, read, corpus, tmp_path):
    """The oracle: the same rows in the same order, from the same position on."""
    here = local_text(corpus, tmp_path)
    given = owner.grant(US)
    with read() as text:
        there = mixed(text)
        assert [(each.name, each.key, each.weight) for each in there.sources] == [
            (each.name, each.key, each.weight) for each in here.sources
        ]
        expected, found = batches(here), batches(there, fetch=text.fetch)
        for _ in range(40):
            np.testing.assert_array_equal(next(found), next(expected))
        assert found.get_state() == expected.get_state()
        again = batches(there, fetch=text.fetch)
        for each in (again, expected):
            each.set_state({"next_index": 20})
        np.testing.assert_array_equal(next(again), next(expected))
        for language in GROUP:
            np.testing.assert_array_equal(
                held_out(there.held_out[language][:10]),
                held_out(here.held_out[language]),
            )
    assert owner.used(given) >= 41 * 6 + 20


def test_a_batch_of_several_parts_is_one_request(owner, read):
    owner.grant(US)
    with read() as text:
        sequences = mixed(text).sources[0].sequences
        others = mixed(text).sources[1].sequences
        before = text._requests
        found = text.fetch([(sequences, 3), (others, 0), (sequences, 3), (others, 1)])
        assert text._requests == before + 1
        np.testing.assert_array_equal(found[0], found[2])
        np.testing.assert_array_equal(found[1], others[0]["input_ids"])


def test_threads_that_read_at_once_get_their_own_rows(owner, read):
    owner.grant(US)
    with read() as text:
        expected = text.read(range(60))
        wrong = []

        def reading(seed):
            for numbers in np.random.default_rng(seed).integers(0, 60, (8, 6)):
                if not np.array_equal(text.read(numbers.tolist()), expected[numbers]):
                    wrong.append(numbers)

        threads = [threading.Thread(target=reading, args=(n,)) for n in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        assert not wrong


def test_readers_come_and_go_and_come_back(owner, read, served):
    owner.grant(US)
    with read() as one, read(cluster="generator:1") as other:
        np.testing.assert_array_equal(one.read([1, 2]), other.read([1, 2]))
    with read() as again:
        again.read([1])
    wait_until(lambda: any("has read what it wanted" in line for line in served))


def test_who_has_no_grant_reads_nothing(read):
    with pytest.raises(remote_text.NoMoreText, match="owner has no grant for"):
        read("s")


def test_an_account_is_not_the_one_of_that_name_at_another_lab(
    owner, read, labs, monkeypatch, tmp_path
):
    """The lab is the certificate's: in grants, in the log, and in what counts."""
    bobs = {}
    for lab in ("s", "t"):
        running = getattr(labs, lab)
        people = running.switch.state.people
        tiny_accounts.person(people, "bob")
        bobs[lab] = host_users.folder_of(monkeypatch, running, tmp_path / lab, "bob")
    theirs = {"federation": str(bobs["t"].path), "job": "bob"}
    granted = owner.grant("bob")
    with pytest.raises(remote_text.NoMoreText, match="bob@lab-t has no grant for"):
        read(**theirs)
    other = owner.grant("bob@lab-t")
    owner.people.move("bob", "suspend")
    with read(**theirs) as text:
        text.read([0])
    with pytest.raises(errors.NebulaError, match="bob may do nothing: it is suspended"):
        read(federation=str(bobs["s"].path), job="bob")
    owner.people.move("bob", "resume")
    assert [owner.used(each) for each in (granted, other)] == [0, 1]
    for each in (labs.s, labs.t):
        wait_until(lambda each=each: not of_bob(each))
    assert labs.s.switch.state.charged["bob"] == 0
    assert labs.t.switch.state.charged["bob"] > 0
    labs.s.call(labs.s.switch.state.audit.commit)
    log = list(audit_entries.read(labs.s.folder.audit))
    names = {each.who for each in log if each.who.startswith("bob")}
    assert names == {"bob@lab-t"}


def of_bob(lab):
    """The streams of a switch that an account of that name has dialed."""
    streams = [about for about, _ in lab.switch.state.in_flight.values()]
    return [each for each in streams if each.account.startswith("bob")]


def test_a_lab_does_not_take_the_places_of_all_others(owner, read, monkeypatch):
    monkeypatch.setattr(data_service, "READERS_OF_LAB", 1)
    owner.grant(US)
    owner.grant("owner")
    with read() as text:
        words = "too many others read corpus-tiny at present"
        with pytest.raises(errors.NebulaError, match=words):
            read(cluster="generator:1")
        with read("s") as own:
            own.read([1])
        text.read([1])


def test_a_spent_grant_serves_no_row_more(owner, read, served):
    given = owner.grant(US, rows=10)
    with read() as text:
        text.read(range(8))
        with pytest.raises(
            remote_text.NoMoreText,
            match=r"data=handle:corpus-tiny: .*has 2 rows left, and 4 were requested",
        ):
            text.read(range(4))
    assert owner.used(given) == 8
    assert any("2 rows left" in line for line in served)


def test_a_revoked_grant_ends_a_session_at_its_next_use(owner, read):
    given = owner.grant(US)
    with read() as text:
        text.read([0])
        owner.revoke(given)
        with pytest.raises(remote_text.NoMoreText, match="was revoked"):
            text.read([0])


def test_an_expired_grant_ends_a_session_at_its_next_use(owner, read, clock):
    owner.grant(US, until=time.time() + 600)
    with read() as text:
        text.read([0])
        clock["ahead"] = 700.0
        try:
            with pytest.raises(remote_text.NoMoreText, match="ended on"):
                text.read([0])
        finally:
            clock["ahead"] = 0.0


def test_another_vocabulary_or_length_is_named(owner, read):
    owner.grant(US)
    with pytest.raises(errors.NebulaError, match=r"max_length=16, .* has max_length=8"):
        read(length=8)


def test_rows_that_are_not_there_end_the_session(owner, read):
    owner.grant(US)
    for number in (10**6, -7):
        with read() as text, pytest.raises(remote_text.NoMoreText, match="there are 0"):
            text.read([number])


def test_a_handle_of_one_lab_is_found_there_alone(owner, read):
    owner.grant(US)
    with pytest.raises(errors.NebulaError, match=r"switch after .* data of job"):
        read(at="lab-t", connect_timeout=0.5)
    with read(at="lab-s") as text:
        text.read([0])


@pytest.fixture
def ana(owner, labs, monkeypatch, tmp_path):
    """The folder of ana, another user of the host of the lab that serves."""
    if "ana" not in [each.name for each in owner.people.listing()]:
        tiny_accounts.person(owner.people, "ana")
    return host_users.folder_of(monkeypatch, labs.s, tmp_path / "ana", "ana")


def test_another_user_of_the_host_reads_by_its_account(owner, read, ana):
    with pytest.raises(remote_text.NoMoreText, match="ana has no grant for corpus-t"):
        read(federation=str(ana.path), job="ana")
    given = owner.grant("ana")
    with read(federation=str(ana.path), job="ana") as text:
        text.read([0])
    assert owner.used(given) == 1


def test_nobody_reads_in_the_name_of_another_account(owner, read, labs, ana):
    """Only the switches say who reads: what else ana sends is the owner's."""
    owner.revoke(owner.grant("ana"))
    owner.grant("owner")
    with read("s") as text:
        text.read([0])
        time.sleep(1.1)  # the incarnations of her folder count seconds by themselves
        with pytest.raises(errors.NebulaError, match=r"here already|read as one"):
            read(federation=str(ana.path))
    time.sleep(1.1)
    with pytest.raises(remote_text.NoMoreText, match=r"no grant for .* revoked"):
        read(federation=str(ana.path))


def test_every_use_is_in_the_audit_log(owner, read, labs):
    time.sleep(2.0)  # what other tests have read is in the log by now
    before = len(list(audit_entries.lines(owner.folder.audit)))
    given = owner.grant(US)
    with read() as text:
        text.read(range(8))
    assert owner.used(given) == 8

    def recorded():
        log = [
            audit_entries.decode(index, line)
            for index, line in enumerate(audit_entries.lines(owner.folder.audit))
        ][before:]
        served = [each for each in log if each.what.get("event") == "served"]
        return [each for each in served if each.what["subject"] == US]

    # An entry a second at most, whatever was served in it.
    wait_until(lambda: sum(each.what["rows"] for each in recorded()) == 8)
    assert {each.kind for each in recorded()} == {"data"}
    assert {each.what["handle"] for each in recorded()} == {HANDLE}


def test_a_reader_without_a_grant_is_refused_before_anything_is_waited_for(owner):
    peer = frames.Hello("generator-0:ab", "0.1", {}, details={"rows": 4})
    link = types.SimpleNamespace(owner=site_folder.trainer_name("lab-u"), peer=peer)
    service = data_service.DataService(owner.folder, HANDLE, log=print)
    trainer = types.SimpleNamespace(dialed_by=lambda *_: {"owner@lab-u"})
    with pytest.raises(grants.GrantError):
        service._served(link, trainer)
    peer.details["rows"] = 10**9
    with pytest.raises(data_channels.DataError, match="no number of rows"):
        service._served(link, trainer)


def test_no_reader_sees_a_path(owner, read, corpus):
    owner.grant(US)
    with read() as text:
        seen = json.dumps([list(map(str, part)) for part, _ in text._places.values()])
        seen += json.dumps([text._link.peer.settings, text._link.peer.details])
    assert str(corpus[0]) not in seen
    assert "/" not in seen.replace("mono/", "").replace("parallel/", "")
