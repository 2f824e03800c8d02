"""The commands about data, on the folder of a lab with a small corpus."""

import datetime
import signal
from unittest import mock

import pytest

from nebula_jax.data.tokenizers import vocabulary
from nebula_jax.runtime.served import data_service, owner_text
from nebula_jax.security import accounts, grants
from scripts.federation import arguments

LINES = [f"la casa {n} tiene {n % 7} puertas y {n % 5} ventanas" for n in range(60)]
UNTIL = "2099-01-01"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with secret-place/mono/{es,fr}.train.txt, and vocabulary.model."""
    path = tmp_path_factory.mktemp("corpus")
    mono = path / "secret-place" / "mono"
    mono.mkdir(parents=True)
    for language, lines in (("es", LINES), ("fr", LINES[:5])):
        for split in ("train", "valid"):
            (mono / f"{language}.{split}.txt").write_text("\n".join(lines) + "\n")
    vocabulary.train(LINES, 60, path / "vocabulary.model")
    return path


def offer(lab, corpus, *more, name="corpus-es", **options):
    return lab(
        "data",
        "add",
        name,
        corpus / "secret-place",
        "--vocabulary",
        corpus / "vocabulary.model",
        "--max_length",
        "32",
        *more,
        **options,
    )


def provider(lab, name):
    return grants.Grants(accounts.Accounts(lab.path)).provider(name)


def test_a_corpus_is_offered_without_its_text_or_path(lab, corpus, tmp_path):
    found = offer(lab, corpus)
    settings, handle = provider(lab, "corpus-es")
    rows = len(owner_text.opened(settings, tmp_path / "prepared", print))
    assert f"{rows} rows; mono/es, mono/fr\n" in found.out
    assert settings == {
        "text_folder": str((corpus / "secret-place").resolve()),
        "vocabulary": str((corpus / "vocabulary.model").resolve()),
        "max_length": 32,
    }
    known = vocabulary.load(corpus / "vocabulary.model")
    assert (handle.rows, handle.vocabulary) == (rows, known.digest)
    shown = lab("data", "list").out + lab("audit", "show").out
    assert "secret-place" not in shown
    assert "casa" not in shown
    assert lab.kinds()[-1] == "data.register"
    service = data_service.DataService(lab.folder, "corpus-es")
    assert len(service._text) == rows
    assert "corpus-es already" in offer(lab, corpus, status=2).err
    assert "there is no handle other" in lab.fails("data", "serve", "other")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["../x", "{}/secret-place"], "is no handle's name"),
        (["x", "{}/nowhere"], "there is no such folder"),
        (["x", "{}"], "no text in it"),
        (["x", "{}/secret-place", "--max_length", "0"], "one at least"),
        (["x", "{}/secret-place", "--vocabulary", "{}/none"], "No such file"),
    ],
)
def test_a_corpus_that_does_not_serve_is_refused(lab, corpus, argv, words):
    argv = [each.format(corpus) for each in argv]
    base = ["--vocabulary", corpus / "vocabulary.model", "--max_length", "32"]
    assert words in lab.fails("data", "add", *base, *argv)
    assert len(lab("data", "list").out.splitlines()) == 1


def test_a_grant_as_the_guide_has_it(lab, corpus):
    offer(lab, corpus)
    lab("account", "add", "ana")
    found = lab("grant", "ana", "corpus-es", "--rows", "1e6", "--until", UNTIL)
    assert found.out == lab("grants").out
    lab("grant", "ana@lab-t", "corpus-es", "--rows", "2e9")
    listed = lab("grants").out.splitlines()
    assert listed[0].startswith("to         data")
    assert listed[1].endswith("1,000,000      2099-01-01 00:00 UTC  active")
    assert "ana@lab-t" in listed[2]
    assert "2,000,000,000" in listed[2]
    ungrant = ("ungrant", "ana", "corpus-es")
    assert lab(*ungrant).out == "the grant of ana for corpus-es is revoked\n"
    assert "ana has no grant for corpus-es" in lab.fails(*ungrant)
    assert lab.kinds()[-3:] == ["grant.give", "grant.give", "grant.revoke"]
    assert "grant revoke (handle corpus-es, " in lab("audit", "show").out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "a grant has a bound"),
        (["--rows", "many"], "no whole number"),
        (["--rows", "1.5"], "no whole number"),
        (["--rows", "0"], "1 to 9007199254740992 rows, not 0"),
        (["--rows", "1e99"], "1 to 9007199254740992 rows, not"),
        (["--until", "tomorrow"], "is no day"),
        (["--until", "2020-01-01"], "is over already"),
    ],
)
def test_a_grant_that_cannot_be_is_refused(lab, corpus, more, words):
    offer(lab, corpus)
    assert words in lab.fails("grant", "ana@lab-t", "corpus-es", *more)
    assert "no handle other" in lab.fails("grant", "ana@lab-t", "other", "--rows", "1")


def test_numbers_of_rows():
    for text, number in (("1.5e3", 1500), ("007", 7), (str(2**53), 2**53)):
        assert arguments.count(text) == number
    for text in ("", "1e-3", "nan", "inf", "1,000", "0x10", "10 GB"):
        with pytest.raises(arguments.InputError, match="is no whole number, as in"):
            arguments.count(text)


def test_a_grant_until_a_day_ends_when_it_begins_in_utc():
    utc = datetime.UTC
    day = datetime.datetime(2027, 1, 1, tzinfo=utc).timestamp()
    assert arguments.day("2027-01-01") == day
    assert arguments.day("2027-01-01T00:01Z") == day + 60
    for text in ("", "2027", "2027-13-01", "2027-02-30", "01-01-2027", "tomorrow"):
        with pytest.raises(arguments.InputError, match="is no day"):
            arguments.day(text)


def test_serving_is_begun(lab, corpus):
    offer(lab, corpus)
    with (
        mock.patch.object(data_service, "DataService") as made,
        mock.patch("signal.signal") as caught,
    ):
        lab("data", "serve", "corpus-es")
    (call,) = made.call_args_list
    assert (call.args[0].path, call.args[1]) == (lab.path, "corpus-es")
    made.return_value.run.assert_called_once_with()
    for number, stop in (each.args for each in caught.call_args_list):
        assert number in (signal.SIGINT, signal.SIGTERM)
        stop(number, None)
    assert made.return_value.stop.call_count == 2
