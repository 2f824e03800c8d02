"""The notebook on codecs, executed; and the tensors that it works on."""

import pathlib

import nbclient
import nbformat
import numpy as np
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "compression.ipynb"
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
    assert mask.shape[:2] == (3, 15)
    assert hidden.shape == gradient.shape == (*mask.shape, hidden.shape[-1])
    assert hidden.dtype == gradient.dtype == np.float32
    assert np.all(np.any(gradient != 0, axis=-1) == mask)
