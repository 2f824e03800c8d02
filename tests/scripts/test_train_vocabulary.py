import pytest
from absl import flags
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from scripts import train_vocabulary


def test_a_vocabulary_is_written_for_all_languages(tmp_path, capsys):
    (tmp_path / "mono").mkdir()
    for language in ("en", "sw"):
        for split in ("train", "valid"):
            lines = [f"{language} line number {n} of {split}" for n in range(200)]
            path = tmp_path / "mono" / f"{language}.{split}.txt"
            path.write_text("".join(line + "\n" for line in lines))
    out = tmp_path / "shared.model"
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(
        out=str(out),
        data_dir=str(tmp_path),
        generators="en|sw",
        task_mix="mrtd",
        vocab_size=60,
    ):
        assert train_vocabulary.main() == 0
    assert vocabularies.load(out).encode("line number 7")
    assert "en, sw" in capsys.readouterr().out


def test_it_is_that_of_the_encoder_that_the_discriminator_begins_with(tmp_path):
    flags.FLAGS(["test"])
    out, start = str(tmp_path / "v"), str(tmp_path / "no_model")
    with (
        flagsaver.flagsaver(
            out=out,
            discriminator_start=start,
            generator_start=start,
            generators="en",
            task_mix="mrtd",
        ),
        pytest.raises(errors.NebulaError, match="no_model"),
    ):
        train_vocabulary.main()
