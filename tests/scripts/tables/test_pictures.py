import json

import pytest

from scripts import make_tables
from scripts.tables import pictures

RESULTS = make_tables.RESULTS


@pytest.fixture(scope="module")
def points():
    """What the records say of bytes and quality."""
    return pictures.quality_points(RESULTS)


def test_the_committed_picture_is_of_the_records(points):
    drawn = pictures.drawn_points(RESULTS / pictures.QUALITY)
    assert drawn == points, "scripts/run python -m scripts.make_tables"
    front = (make_tables.ROOT / "README.md").read_text()
    assert f"](experiments/results/{pictures.QUALITY})" in front


def test_a_point_is_a_row_of_the_records(points):
    record = json.loads((RESULTS / "local_steps.json").read_text())
    (row,) = (row for row in record["rows"] if row["key"] == "streaming2")
    (found,) = (each for each in points if each.name == "streaming, 2")
    apart = row["difference"]
    assert found.fewer == pytest.approx(row["bytes"]["fewer"], abs=1e-3)
    assert found.loss == pytest.approx(100 * apart["mean"], abs=1e-3)
    assert found.error == pytest.approx(100 * apart["standard_error"], abs=1e-3)
    assert {each.group for each in points} == set(pictures.STYLE)
    assert not {"subspace", "top_k", "delta"} & {each.name for each in points}


def test_a_picture_keeps_its_points_and_is_drawn_alike_each_time(points, tmp_path):
    path = tmp_path / "quality.svg"
    assert pictures.drawn_points(path) == []
    pictures.quality(points, path)
    first = path.read_bytes()
    pictures.quality(points, path)
    assert path.read_bytes() == first
    assert pictures.drawn_points(path) == points
