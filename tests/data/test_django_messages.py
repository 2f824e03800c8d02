import pytest

from nebula_jax.data import django_messages, text_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("django")
    django_messages.write_text_folder(folder)
    return folder


@pytest.mark.parametrize("language", text_folder.LANGUAGES)
def test_every_xnli_language_has_real_text_to_train_on_and_to_hold_back(
    folder, language
):
    train, valid = (
        list(text_folder.read_mono(text_folder.mono_path(folder, language, split)))
        for split in ("train", "valid")
    )
    assert len(train) > 300
    assert len(valid) > 30
    if language != "en":
        pairs = text_folder.parallel_path(folder, f"en-{language}", "train")
        assert len(list(text_folder.read_parallel(pairs))) == len(train)


def test_held_out_messages_are_held_out_in_every_language(folder):
    english = set(text_folder.read_mono(text_folder.mono_path(folder, "en", "valid")))
    for language in text_folder.LANGUAGES[1:]:
        train = text_folder.parallel_path(folder, f"en-{language}", "train")
        assert english.isdisjoint(dict(text_folder.read_parallel(train)))


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
