"""What the README shows is so."""

import doctest
import json
import pathlib
import pickle

import numpy as np
import safetensors.numpy

from experiments.m3 import report

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"


def test_its_examples_run():
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted
    assert not results.failed


def test_the_quickstart_ends_as_its_record_does():
    record = ROOT / "experiments" / "results" / "m3_quickstart.json"
    last = report.markdown(json.loads(record.read_text())).strip().splitlines()[-1]
    assert f"\n    {last}\n" in README.read_text()


def test_the_split_model_is_quoted_as_it_is():
    source = (ROOT / "experiments" / "split_your_model.py").read_text()
    start, end = source.index("def front("), source.index("def train_back(")
    lines = [line for line in source[start:end].splitlines() if line]
    quoted = [line.removeprefix("    ") for line in README.read_text().splitlines()]
    first = quoted.index(lines[0])
    assert [line for line in quoted[first:] if line][: len(lines)] == lines


def test_paddles_files_become_safetensors_as_it_says(tmp_path, monkeypatch):
    """Paddle pickles a dictionary of arrays, and a table of names with an @@ name."""
    guide = (ROOT / "experiments" / "xnli" / "README.md").read_text()
    lines = [line.removeprefix("    ") for line in guide.splitlines()]
    start = lines.index("import pickle, safetensors.numpy")
    arrays = {"ernie_m.embeddings.layer_norm.weight": np.arange(3, dtype=np.float32)}
    monkeypatch.chdir(tmp_path)
    with pathlib.Path("model_state.pdparams").open("wb") as stream:
        pickle.dump(arrays | {"StructuredToParameterName@@": {"a": "b"}}, stream)
    exec("\n".join(lines[start : start + 3]), {})
    found = safetensors.numpy.load_file("model.safetensors")
    assert found.keys() == arrays.keys()
    for name in arrays:
        np.testing.assert_array_equal(found[name], arrays[name])
