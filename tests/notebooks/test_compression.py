"""The notebook on codecs, executed; and the model cut in two that it works on."""

import functools
import pathlib

import activations
import jax
import jax.numpy as jnp
import nbclient
import nbformat
import numpy as np
import pytest
from flax import linen as nn

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.training import m3, m3_predictions

NOTEBOOK = pathlib.Path(activations.__file__).with_name("compression.ipynb")
FIGURES = (
    *("hidden", "gradient", "spectra", "cost", "cosine", "bottleneck", "decisions"),
    *("yours", "time"),
)


# What is executed takes minutes: every test of it is slow.
@pytest.fixture(scope="module", params=[pytest.param("all", marks=pytest.mark.slow)])
def executed(finished_run):
    """The notebook after a run from top to bottom."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEBULA_RUN", str(finished_run))
        client.execute()
    return notebook


def texts(cell) -> str:
    """All that a cell printed."""
    return "".join(
        output.text for output in cell.get("outputs", []) if "text" in output
    )


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
    assert drawn[: len(FIGURES)] == list(FIGURES)


def test_outputs_show_no_paths(executed, finished_run):
    """Neither of this run nor of the one whose outputs are in the repository."""
    for notebook in (executed, nbformat.read(NOTEBOOK, as_version=4)):
        for cell in notebook.cells:
            for path in (str(finished_run.parent), str(activations.ROOT), "/tmp/"):
                assert path not in texts(cell)


def test_the_notebook_lies_in_the_repository_with_its_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert NOTEBOOK.stat().st_size < 1_000_000
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


@pytest.fixture(scope="module")
def small():
    """A configuration, parameters and tokens with padding, all of them random."""
    model = transformer.config_of_size("nano", vocab_size=50, max_length=12)
    config = m3.Config(model, model, steps=10, warmup_steps=1)
    params = jax.jit(lambda: m3.init_discriminator(config, seed=1).params)()
    rng = np.random.default_rng(2)
    ids = rng.integers(vocabularies.NUM_SPECIAL, 50, (4, 12)).astype(np.int32)
    ids[1, 7:] = ids[3, 4:] = vocabularies.SPECIAL.pad
    generator = jax.jit(lambda: m3.init_generator(config, seed=1, index=0).params)()
    corrupt = jax.jit(functools.partial(m3_predictions.corrupt, config))
    return config, params, corrupt(generator, jax.random.key(3), ids)


@pytest.fixture(scope="module")
def whole_loss(small):
    """The loss of the model that is not cut."""
    config, params, tokens = small
    loss = jax.jit(functools.partial(m3.discriminator_loss, config))
    return loss(params, jax.random.key(0), tokens)[0]


@pytest.mark.parametrize("cut", [0, 2])
def test_the_halves_equal_the_whole(small, whole_loss, cut):
    config, params, tokens = small
    cross = jax.jit(functools.partial(activations.crossing, config, cut))
    crossing = cross(params, tokens)

    # The oracle is not cut: m3's own loss, with one module's output replaced.
    def loss(hidden):
        def replace(call, args, kwargs, context):
            if context.module.path == path and context.method_name == "__call__":
                return hidden
            return call(*args, **kwargs)

        with nn.intercept_methods(replace):
            return m3.discriminator_loss(config, params, jax.random.key(0), tokens)[0]

    path = ("encoder", f"layer_{cut - 1}") if cut else ("embeddings",)
    np.testing.assert_allclose(crossing.loss, whole_loss, rtol=1e-6)
    gradient = jax.jit(jax.grad(loss))(crossing.hidden)
    # Float32 sums in another order.
    np.testing.assert_allclose(crossing.gradient, gradient, rtol=1e-4, atol=1e-7)
    assert np.any(crossing.gradient)


def test_padding_does_not_matter_above_the_cut(small):
    config, params, tokens = small
    crossing = jax.jit(functools.partial(activations.crossing, config, 1))(
        params, tokens
    )
    real = np.asarray(crossing.mask)
    assert np.sum(~real) == 5 + 8
    assert not np.any(np.asarray(crossing.gradient)[~real])
    upper = activations.above(params, 1)
    other = jnp.where(crossing.mask[..., None], crossing.hidden, 7.0)
    loss_above = jax.jit(functools.partial(activations.loss_above, config, 1))
    loss = loss_above(upper, other, crossing.mask, tokens)
    np.testing.assert_allclose(loss, crossing.loss, rtol=1e-6)


def test_the_halves_have_every_parameter_and_share_the_table_alone(small):
    _, params, _ = small
    lower, upper = activations.below(params, 1), activations.above(params, 1)
    assert set(lower["encoder"]) | set(upper["encoder"]) == set(params["encoder"])
    assert not set(lower["encoder"]) & set(upper["encoder"])
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(tree))
        for tree in (lower, upper, params)
    ]
    assert sizes[0] + sizes[1] == sizes[2] + upper["table"].size


@pytest.mark.slow  # the run takes as long as all others here
def test_batches_are_the_runs_own_text_and_the_same_every_time(finished_run):
    run = activations.open_run(finished_run)
    assert run.steps == [2, 4]
    text = activations.held_out_text(run)
    assert text.name == "the run's own"
    first, again = (
        activations.corrupted_batches(run, text, count=2, batch_size=7)
        for _ in range(2)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first[0].input_ids.shape == (6, 16)  # 7 rows do not divide by two generators
    assert np.any(first[0].input_ids != first[1].input_ids)


def test_without_a_run_the_command_that_makes_one_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("NEBULA_RUN", raising=False)
    monkeypatch.setattr(activations, "ROOT", tmp_path)
    with pytest.raises(activations.RunError, match=r"m3_quickstart\.flags"):
        activations.find_run()
    flagfile = activations.COMMAND.rpartition("=")[2]
    assert (NOTEBOOK.parents[1] / flagfile).is_file()
    monkeypatch.setenv("NEBULA_RUN", "nowhere")
    with pytest.raises(activations.RunError, match="nowhere: no discriminator's"):
        activations.find_run()


@pytest.mark.slow
def test_the_newest_run_is_found(finished_run, tmp_path, monkeypatch):
    monkeypatch.delenv("NEBULA_RUN", raising=False)
    monkeypatch.setattr(activations, "ROOT", finished_run.parents[1])
    assert activations.find_run() == finished_run
