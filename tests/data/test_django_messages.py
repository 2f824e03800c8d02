import pytest

from nebula_jax.data import corpora, django_messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("django")
    django_messages.write_text_folder(folder)
    return folder


@pytest.mark.parametrize("language", corpora.LANGUAGES)
def test_every_xnli_language_has_real_text_to_train_on_and_to_hold_back(
    folder, language
):
    train = list(corpora.read_mono(corpora.mono_path(folder, language, "train")))
    valid = list(corpora.read_mono(corpora.mono_path(folder, language, "valid")))
    assert len(train) > 300
    assert len(valid) > 30
    if language != "en":
        pairs = corpora.parallel_path(folder, language, "train")
        assert len(list(corpora.read_parallel(pairs))) == len(train)


def test_a_translation_known_by_heart(folder):
    path = corpora.parallel_path(folder, "de", "train")
    assert corpora.Pair("A JSON object", "Ein JSON-Objekt") in list(
        corpora.read_parallel(path)
    )


def test_held_back_messages_are_held_back_in_every_language(folder):
    english = set(corpora.read_mono(corpora.mono_path(folder, "en", "valid")))
    for language in corpora.LANGUAGES[1:]:
        train = corpora.parallel_path(folder, language, "train")
        assert english.isdisjoint(pair.english for pair in corpora.read_parallel(train))


def test_groupings_cover_all_languages(folder):
    for count in (1, 2):
        groups = corpora.families(folder, count)
        assert len(groups) == count
        covered = [language for group in groups for language in group]
        assert sorted(covered) == sorted(corpora.LANGUAGES)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("Select %(name)s to <b>change</b>", "Select … to change"),
        ("%(value).1f million", "… million"),
        ("a\n  b&amp;c {path}", "a b&c …"),
        ("%d%%", "…%%"),
    ],
)
def test_markup_becomes_plain_text(raw, clean):
    assert django_messages._clean(raw) == clean
