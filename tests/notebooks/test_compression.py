"""The notebook on codecs, executed; and the tensors that it works on."""

import functools
import pathlib

import activations
import jax
import nbclient
import nbformat
import numpy as np
import pytest
from flax import linen as nn

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.training import m3, m3_predictions

NOTEBOOK = pathlib.Path(activations.__file__).with_name("compression.ipynb")
FIGURES = ("hidden", "gradient", "line", "spectra", "bottleneck", "yours", "sums")


# It compiles sixty programs in half a minute.
@pytest.fixture(scope="module", params=[pytest.param("all", marks=pytest.mark.slow)])
def executed(tmp_path_factory):
    """The notebook after a run from top to bottom on somebody's own tensors."""
    path = tmp_path_factory.mktemp("own") / "mine.npz"
    rng, mask = np.random.default_rng(0), np.arange(8) < np.array([[[8], [5]]] * 2)
    hidden, gradient = rng.normal(size=(2, *mask.shape, 64)).astype(np.float32)
    np.savez(path, mask=mask, hidden=hidden, gradient=gradient * mask[..., None])
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=100, resources=where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEBULA_TENSORS", str(path))
        client.execute()
    return notebook


def test_the_notebook_runs_without_a_warning_and_draws_its_figures(executed):
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            assert output.output_type in ("stream", "display_data"), output
            assert output.get("name") != "stderr", output.text
    drawn = [
        cell.id
        for cell in executed.cells
        if any("image/png" in each.get("data", {}) for each in cell.get("outputs", []))
    ]
    assert drawn == list(FIGURES)


def test_the_notebook_lies_in_the_repository_with_its_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert NOTEBOOK.stat().st_size < 1_000_000
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    for path in (str(NOTEBOOK.parents[1]), "/tmp/"):  # of no machine
        assert not any(path in output.get("text", "") for output in outputs)


def test_the_tensors_in_the_repository_are_what_the_notebook_says():
    found = np.load(NOTEBOOK.with_name("tensors.npz"))
    mask, hidden, gradient = (found[name] for name in ("mask", "hidden", "gradient"))
    assert mask.shape[:2] == (activations.BATCHES, 15)
    assert hidden.shape == gradient.shape == (*mask.shape, hidden.shape[-1])
    assert hidden.dtype == gradient.dtype == np.float32
    assert np.all(np.any(gradient != 0, axis=-1) == mask)


@pytest.mark.slow
def test_the_gradient_at_the_cut_is_that_of_what_crosses_it():
    """The oracle replaces the output of the last block below the cut."""
    model = transformer.config_of_size("nano", vocab_size=50, max_length=12)
    config = m3.Config(model, model, steps=10, warmup_steps=1)
    rng = np.random.default_rng(2)
    ids = rng.integers(vocabularies.NUM_SPECIAL, 50, (4, 12)).astype(np.int32)
    ids[1, 7:] = ids[3, 4:] = vocabularies.SPECIAL.pad
    params, generator = jax.jit(
        lambda: (
            m3.init_discriminator(config, seed=1).params,
            m3.init_generator(config, seed=1, index=0).params,
        )
    )()
    corrupt = jax.jit(functools.partial(m3_predictions.corrupt, config))
    tokens = corrupt(generator, jax.random.key(3), ids)
    crossing = jax.jit(functools.partial(activations.crossing, config, 1))
    hidden, gradient = crossing(params, tokens)

    def loss(hidden):
        def replace(call, args, kwargs, context):
            is_block = context.module.path == ("encoder", "layer_0")
            if is_block and context.method_name == "__call__":
                return hidden
            return call(*args, **kwargs)

        with nn.intercept_methods(replace):
            return m3.discriminator_loss(config, params, jax.random.key(0), tokens)[0]

    value, expected = jax.jit(jax.value_and_grad(loss))(hidden)
    whole, _ = m3.discriminator_loss(config, params, jax.random.key(0), tokens)
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    # Float32 sums in another order.
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    is_text = np.asarray(m3.inputs_of(tokens).attention_mask)
    assert np.all(np.any(np.asarray(gradient) != 0, axis=-1) == is_text)


@pytest.mark.slow  # the run takes as long as all others here
def test_tensors_are_of_a_finished_runs_own_text(finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(finished_run.parents[1])
    for name in ("first.npz", "again.npz"):
        activations.main("runs/tiny", str(tmp_path / name))
    first, again = (np.load(tmp_path / f"{name}.npz") for name in ("first", "again"))
    assert first["hidden"].shape == (activations.BATCHES, 3, 16, 64)
    assert not np.array_equal(first["hidden"][0], first["hidden"][1])
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
