import pytest
import served_corpus

from nebula_jax import errors
from nebula_jax.runtime.served import owner_text


def test_text_that_the_vocabulary_lacks_is_named_where_it_is_served(tmp_path):
    """As where a folder is read: a reader cannot look, since its grant would pay."""
    text, vocabulary = served_corpus.corpus(tmp_path)
    settings = {"text_folder": text, "vocabulary": vocabulary.path, "max_length": 16}
    said = []
    for known, words in ((99, ""), (10, "WARNING: zh: "), (0, "zh: .* are unknown to")):
        for split in ("train", "valid"):
            lines = ["the old house stands\n"] * known + ["猫狗鱼鸟\n"] * 10
            (text / "mono" / f"zh.{split}.txt").write_text("".join(lines))
        prepared = tmp_path / f"prepared-{known}"
        if known:
            owner_text.opened(settings, prepared, said.append)
            assert "".join(said).startswith(words)
        else:
            with pytest.raises(errors.NebulaError, match=words):
                owner_text.opened(settings, prepared, said.append)
