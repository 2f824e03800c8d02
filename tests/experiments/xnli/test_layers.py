"""Fine-tuning of the first layers of an encoder, some of them frozen."""

import configured
import jax
import numpy as np
import pytest
import tiny_nli

from experiments.xnli import config, models
from nebula_jax import errors
from nebula_jax.models import pretrained


def test_the_first_layers_are_those_of_the_encoder(tmp_path):
    folder = tiny_nli.write_model(tmp_path / "bert", layers=3)
    given = {"encoder": folder, "length_buckets": "16"}
    model, _ = models.load(configured.run(config, **given, encoder_layers=2))
    whole = pretrained.load(folder)
    assert model.config.layers == 2
    assert len(model.params["encoder"]) == 2
    jax.tree.map(
        np.testing.assert_array_equal,
        model.params["encoder"]["layer_1"],
        whole.params["encoder"]["layer_1"],
    )
    with pytest.raises(errors.NebulaError, match="4 layers of a model that has 3"):
        models.load(configured.run(config, **given, encoder_layers=4))
