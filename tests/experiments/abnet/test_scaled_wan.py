import dataclasses
import json

import pytest
import tiny_translations

from experiments.abnet import scaled_wan, target_model
from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.data import split_parallel


@pytest.fixture
def given(tmp_path):
    """A run whose line is yet to be measured."""
    return tiny_translations.run(wan=scaled_wan.AUTO, cluster="all", workdir=tmp_path)


MODELS = "a digest", "another"


def test_the_wire_weighs_what_it_weighed_in_the_paper():
    found = scaled_wan.scale(compute_seconds=2.0, padded_bits=40_000_000)
    lines = wan.from_string(found.wan)
    assert lines.up == lines.down
    wire = found.padded_bits / lines.up.rate
    assert wire == pytest.approx(10 * 2.0, rel=1e-3)
    # 201.3 Mbit at 60 Mbit/s; a tenth of it is the paper's compute.
    assert pytest.approx(3.355, abs=1e-3) == 10 * scaled_wan.PAPER_COMPUTE
    assert found.factor == pytest.approx(2.0 / 0.3355, rel=1e-3)
    assert lines.up.delay == pytest.approx(0.015 * found.factor, rel=1e-2)


def test_the_papers_own_step_gives_the_papers_line():
    found = scaled_wan.scale(scaled_wan.PAPER_COMPUTE, scaled_wan.PAPER_BITS)
    assert wan.from_string(found.wan).up == wan.Line(60e6, 0.015)
    assert found.factor == 1


def test_the_line_is_returned_reported_and_kept(given, monkeypatch, tmp_path, capsys):
    measured = []

    def measure(run, folders):
        measured.append(folders)
        return 0.5, 10_000_000

    monkeypatch.setattr(scaled_wan, "measure", measure)
    assert scaled_wan.resolve(given, ("x", "y"), MODELS) == "2000kbit,22.35ms"
    reported = capsys.readouterr().err
    assert "--wan=2000kbit,22.35ms" in reported
    assert "1.49 times the paper's" in reported
    kept = scaled_wan.read(dataclasses.replace(given.local, wan="2000kbit,22.35ms"))
    assert kept == dataclasses.asdict(scaled_wan.scale(0.5, 10_000_000))
    # The run goes on: the same line, not measured anew.
    assert scaled_wan.resolve(given, ("x", "y"), MODELS) == "2000kbit,22.35ms"
    assert len(measured) == 1
    json.dumps(kept)
    # One that another --wan is given has no measured line; other settings, another.
    assert scaled_wan.read(dataclasses.replace(given.local, wan="60mbit")) == {}
    other = given.with_agreed(micro_batches=1 + given.agreed.micro_batches)
    scaled_wan.resolve(other, ("x", "y"), MODELS)
    assert len(measured) == 2


def test_a_line_is_that_of_the_models_and_of_what_they_train_not_of_paths(
    given, monkeypatch
):
    measured = []

    def measure(run, folders):
        measured.append(folders)
        return 0.5, 10_000_000

    monkeypatch.setattr(scaled_wan, "measure", measure)
    again = given.with_local(source_model="./elsewhere")
    for run, models, count in (
        (given, MODELS, 1),
        (again, MODELS, 1),
        (again, ("other", "another"), 2),
        (again.with_local(train_all=True), ("other", "another"), 3),
    ):
        scaled_wan.resolve(run, ("x", "y"), models)
        assert len(measured) == count


def test_a_line_that_is_given_stays(given, tmp_path):
    run = given.with_local(wan="60mbit,15ms")
    assert scaled_wan.resolve(run, ("x", "y"), MODELS) == "60mbit,15ms"
    assert scaled_wan.read(run.local) == {}
    assert scaled_wan.without(run.local).wan == "60mbit,15ms"
    assert scaled_wan.without(given.local).wan == ""


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("source", "give source and target the same line"),
        ("target", "give source and target the same line"),
        ("whole", "has no line"),
    ],
)
def test_only_all_clusters_together_can_measure(given, cluster, message):
    scaled_wan.check(given.local)
    run = given.with_local(cluster=cluster)
    with pytest.raises(errors.SettingsError, match=message):
        scaled_wan.check(run.local)
    scaled_wan.check(run.with_local(wan="").local)


@pytest.mark.slow
def test_both_halves_of_the_largest_bucket_are_measured(tmp_path):
    text = tiny_translations.write_text(tmp_path / "text")
    folders = split_parallel.split(text, ("es", "en"), tmp_path / "sides")
    models = {
        f"{side}_model": str(
            tiny_translations.write_model(
                tmp_path / side, 16, 0, side == "target", layers=1
            )
        )
        for side in ("source", "target")
    }
    values = tiny_translations.TINY | models
    values |= {
        "workdir": tmp_path / "run",
        "prepared_dir": tmp_path / "prepared",
        "devices_per_cluster": 4,
        # What the codecs take is not the plain step's.
        "forward_codec": "fp16",
    }
    run = tiny_translations.run(**values)
    target_model.prepare(run, folders[1])
    seconds, padded = scaled_wan.measure(run, folders)
    assert 0 < seconds < 60
    rows, longest, width = values["batch_size"], 16, 16
    assert padded == 32 * rows * longest * width
