import pytest
import tiny_runs
from absl.testing import flagsaver

from nebula_jax import errors
from scripts import train_vocabulary


def test_it_is_that_of_the_encoder_that_the_discriminator_begins_with(tmp_path):
    out, start = str(tmp_path / "v"), str(tmp_path / "no_model")
    text = tiny_runs.write_text(tmp_path / "text")
    with (
        flagsaver.flagsaver(
            out=out,
            data_dir=str(text),
            discriminator_start=start,
            generator_start=start,
            generators="en",
            task_mix="mrtd",
        ),
        pytest.raises(errors.NebulaError, match="no_model"),
    ):
        train_vocabulary.main()
