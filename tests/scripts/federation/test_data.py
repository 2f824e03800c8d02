"""The commands about data, on the folder of a lab with a small corpus."""

import json
from unittest import mock

import nebula_command
import pytest

from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary
from nebula_jax.runtime.served import data_service, owner_text
from nebula_jax.security.accounts import identity, tokens
from nebula_jax.security.grants import data_access
from scripts.federation import data

LINES = [f"la casa {n} tiene {n % 7} puertas y {n % 5} ventanas" for n in range(60)]
UNTIL = "2099-01-01"


@pytest.fixture
def lab(tmp_path):
    return nebula_command.Lab(tmp_path / "s")


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
        *("data", "add", name, corpus / "secret-place"),
        *("--vocabulary", corpus / "vocabulary.model", "--max_length", "32", *more),
        **options,
    )


def provider(lab, name):
    with identity.Identity.open(lab.path) as found:
        by = found.account_of(tokens.owner(found.folder), 0.0)
        access = data_access.DataAccess(found.store)
        return access.provider(by, name), access.find(name), access.mock(name)


def test_a_corpus_is_offered_by_its_form_alone(lab, corpus, tmp_path):
    found = offer(lab, corpus)
    settings, handle, mock_rows = provider(lab, "corpus-es")
    rows = len(owner_text.opened(settings, tmp_path / "prepared"))
    assert f"{rows} rows; sentences in es, fr\n" in found.out
    known = vocabulary.load(corpus / "vocabulary.model")
    assert settings == {
        "kind": "mono",
        "text_folder": str((corpus / "secret-place").resolve()),
        "vocabulary": str((corpus / "vocabulary.model").resolve()),
        "max_length": 32,
    }
    assert handle.schema == (
        *({"input_ids": "int32[]"}, rows, known.digest, "sentences in es, fr"),
    )
    ids = {each for row in mock_rows for each in row["input_ids"]}
    assert ids
    assert min(ids) >= vocabulary.NUM_SPECIAL
    assert max(ids) < known.size
    shown = lab("data", "show", "corpus-es").out + lab("data", "list").out
    shown += lab("audit", "show").out
    assert "secret-place" not in shown
    assert "casa" not in shown
    invented = lab("data", "show", "corpus-es").out.partition("invented rows:\n")[2]
    assert [json.loads(row) for row in invented.splitlines()] == mock_rows
    assert lab.kinds()[-1] == "data.register"


def test_invented_rows_do_not_depend_on_the_text(lab, corpus, tmp_path):
    other = tmp_path / "secret-place" / "mono"
    other.mkdir(parents=True)
    for split in ("train", "valid"):
        (other / f"es.{split}.txt").write_text("otra cosa\n")
    (tmp_path / "vocabulary.model").symlink_to(corpus / "vocabulary.model")
    offer(lab, corpus)
    offer(lab, tmp_path, name="other")
    assert provider(lab, "corpus-es")[2] == provider(lab, "other")[2]


def test_one_side_of_a_parallel_corpus_has_ids_of_its_tokenizer(lab, tmp_path):
    side = tmp_path / "secret-place"
    side.mkdir()
    for split in ("train", "dev", "test"):
        (side / f"{split}.tsv").write_text("id\ttext\n7\tla casa\n8\tla puerta\n")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words = ["[PAD]", "la", "casa", "[UNK]", "[CLS]", "[SEP]", "puerta", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    lab(
        *("data", "add", "side-es", side, "--vocabulary", folder),
        *("--max_length", "8", "--kind", "side", "--about", "Doors."),
    )
    settings, handle, mock_rows = provider(lab, "side-es")
    assert settings["kind"] == "side"
    assert handle.schema == (
        {"id": "text", "input_ids": "int32[]"},
        *(2, tokenizers.load(folder).digest, "Doors."),
    )
    assert {each for row in mock_rows for each in row["input_ids"]} == {1, 2, 6}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["../x", "{}/secret-place"], "is no handle's name"),
        (["x", "{}/nowhere"], "there is no such folder"),
        (["x", "{}"], "no text in it"),
        (["x", "{}/secret-place", "--max_length", "0"], "one at least"),
        (["x", "{}/secret-place", "--vocabulary", "{}/none"], "No such file"),
        (["x", "{}/secret-place", "--kind", "side"], "train.tsv.gz is missing"),
    ],
)
def test_a_corpus_that_does_not_serve_is_refused(lab, corpus, argv, words):
    argv = [each.format(corpus) for each in argv]
    base = ["--vocabulary", corpus / "vocabulary.model", "--max_length", "32"]
    assert words in lab("data", "add", *base, *argv, status=1).err
    assert len(lab("data", "list").out.splitlines()) == 1


def test_a_grant_as_the_guide_has_it(lab, corpus):
    offer(lab, corpus)
    lab("account", "add", "ana", stdin=f"{nebula_command.PASSWORD}\n")
    found = lab("grant", "ana", "corpus-es", "--rows", "1e6", "--until", UNTIL)
    assert found.out == (
        "grant 1: ana may use corpus-es (schema, lengths, rows), up to 1,000,000 rows,"
        " until 2099-01-01 00:00 UTC\n"
    )
    lab(
        *("grant", "ana@lab-t", "corpus-es", "--bytes", "2e9"),
        *("--operations", "schema, lengths"),
    )
    listed = lab("grants").out.splitlines()
    assert listed[0].startswith("grant  to")
    assert listed[1].endswith("1,000,000  any            2099-01-01 00:00 UTC  active")
    assert "ana@lab-t" in listed[2]
    assert "2,000,000,000" in listed[2]
    assert len(lab("grants", "--subject", "ana").out.splitlines()) == 2
    assert len(lab("grants", "--handle", "none").out.splitlines()) == 1
    assert lab("ungrant", "1").out == "grant 1 of ana for corpus-es is revoked\n"
    assert "grant 1 is revoked already" in lab.fails("ungrant", "1")
    for number in ("7", "9" * 23):
        assert f"there is no grant {number}" in lab.fails("ungrant", number)
        refused = lab.fails("data", "refuse", number)
        assert f"there is no request {number}" in refused
    assert lab.kinds()[-3:] == ["grant.give", "grant.give", "grant.revoke"]
    assert "revoked grant 1 to ana" in lab("audit", "show", "--last", "1").out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "a grant has a bound"),
        (["--rows", "many"], "no whole number"),
        (["--rows", "1.5"], "no whole number"),
        (["--until", "tomorrow"], "is no day"),
        (["--until", "2020-01-01"], "is over already"),
        (["--rows", "1", "--operations", "all"], "is no operation on data"),
    ],
)
def test_a_grant_that_cannot_be_is_refused(lab, corpus, more, words):
    offer(lab, corpus)
    assert words in lab.fails("grant", "ana@lab-t", "corpus-es", *more)
    assert "there is no handle other" in lab.fails(
        *("grant", "ana@lab-t", "other", "--rows", "1")
    )


def test_who_requests_data_waits_for_its_owner(lab, corpus):
    lab.add("ana")
    lab.add("eva")
    lab.add("ian")
    offer(lab, corpus, "--account", "eva")
    asked = ("data", "request", "corpus-es", "--account", "ana")
    assert lab(*asked, "--why", "To train.").out == (
        "request 1 for corpus-es waits for eva\n"
    )
    requests = ("data", "requests", "--account")
    assert "To train." in lab(*requests, "eva").out
    assert "To train." in lab(*requests, "ana").out
    assert "To train." not in lab(*requests, "ian").out
    refused = lab.fails("data", "refuse", "1", "--account", "ian")
    assert "ian (researcher) may not do grant.give" in refused
    assert lab("data", "refuse", "1", "--account", "eva").out == (
        "request 1 of ana is refused\n"
    )
    assert "To train." not in lab("data", "requests").out
    assert "refused" in lab("data", "requests", "--all").out
    lab(*asked)
    lab("grant", "ana", "corpus-es", "--rows", "9", "--account", "eva")
    assert "granted" in lab("data", "requests", "--all").out
    assert len(lab("grants", "--account", "ana").out.splitlines()) == 2
    assert len(lab("grants", "--account", "ian").out.splitlines()) == 1
    assert "may not do grant.revoke" in lab.fails("ungrant", "1", "--account", "ian")


def test_data_that_is_withdrawn_is_gone(lab, corpus):
    offer(lab, corpus)
    lab("data", "withdraw", "corpus-es")
    assert "withdrawn" in lab("data", "list").out
    assert "was withdrawn" in lab.fails("data", "request", "corpus-es")
    assert "is withdrawn" in lab.fails("data", "serve", "corpus-es")
    assert "corpus-es already" in offer(lab, corpus, status=1).err


def test_what_was_offered_can_be_served_from_where_it_was_packed(lab, corpus):
    offer(lab, corpus)
    service = data_service.DataService(lab.folder, "corpus-es")
    assert len(service._served.text) == provider(lab, "corpus-es")[1].schema.rows
    service._identity.close()


def test_serving_is_begun_for_the_owner_alone(lab, corpus):
    lab.add("ana")
    offer(lab, corpus)
    with mock.patch.object(data_service, "serve", return_value=0) as serve:
        lab("data", "serve", "corpus-es")
        assert "may not do data.serve with data of" in lab.fails(
            *("data", "serve", "corpus-es", "--account", "ana")
        )
    (call,) = serve.call_args_list
    folder, name, account, _ = call.args
    assert (folder.path, name, account) == (lab.path, "corpus-es", "")


def test_every_operation_is_granted_by_default():
    assert data.ALL.split(",") == list(data_access.OPERATIONS)
