import pytest
import tiny_translations

from experiments.abnet import target_model
from nebula_jax.communication import wan
from nebula_jax.data import split_parallel
from scripts.tables import scaled_line


def test_the_wire_weighs_what_it_weighed_in_the_paper():
    found = scaled_line.scale(compute_seconds=2.0, padded_bits=40_000_000)
    lines = wan.from_string(found["wan"])
    assert lines.up == lines.down
    wire = found["padded_bits"] / lines.up.rate
    assert wire == pytest.approx(10 * 2.0, rel=1e-3)
    # 201.3 Mbit at 60 Mbit/s; a tenth of it is the paper's compute.
    assert pytest.approx(3.355, abs=1e-3) == 10 * scaled_line.PAPER_COMPUTE
    assert found["factor"] == pytest.approx(2.0 / 0.3355, rel=1e-3)
    assert lines.up.delay == pytest.approx(0.015 * found["factor"], rel=1e-2)


def test_the_papers_own_step_gives_the_papers_line():
    found = scaled_line.scale(scaled_line.PAPER_COMPUTE, scaled_line.PAPER_BITS)
    assert wan.from_string(found["wan"]).up == wan.Line(60e6, 0.015)
    assert found["factor"] == 1


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
    seconds, padded = scaled_line.measure(run, folders)
    assert 0 < seconds < 60
    rows, longest, width = values["batch_size"], 16, 16
    assert padded == 32 * rows * longest * width
