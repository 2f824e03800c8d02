import json
import pathlib
import re
import statistics

import pytest

from nebula_jax import errors
from scripts import make_tables
from scripts.tables import main_results

MAKE = "scripts.make_tables"


def test_the_committed_pages_are_what_the_script_makes_of_the_results():
    for page, text in make_tables.pages().items():
        assert page.read_text() == text, f"{page}: scripts/run python -m {MAKE}"
    for name in ("m3_quickstart", "m3_xnli15_tiny"):
        text = (make_tables.RESULTS / f"{name}.md").read_text()
        assert text.count("\n| ") > 15, f"no results of {name}"


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *(("bench_bridge", 0), ("bench_codecs", 0), ("bench_device", 0)),
        *(("local_steps", 2), ("table5_tiny", 0)),
        ("table5_bottleneck", 1),
    ],
)
def test_an_older_record_has_the_same_rows_still_but_those_of_withdrawn_modes(
    name, others
):
    assert make_tables._is_older(make_tables.RESULTS / f"{name}.json")
    page = make_tables._page(name, make_tables.RESULTS).read_text().splitlines()
    block = make_tables.block(name, make_tables.RESULTS).splitlines()
    rows = [line for line in block if line.startswith("| ")]
    assert len(rows) >= 5
    assert len([line for line in rows if line not in page]) == others


def test_every_record_has_a_page_and_every_page_is_in_the_index():
    index = (make_tables.ROOT / "experiments" / "README.md").read_text()
    records = {path.stem for path in make_tables.RESULTS.glob("*.json")}
    listed = set(re.findall(r"^\| \[(\w+)\]\(results/\1\.md\) ", index, re.MULTILINE))
    assert listed == records - set(make_tables.SECURITY)
    assert listed == {path.stem for path in make_tables.RESULTS.glob("*.md")}


def test_no_measured_figure_is_typed_by_hand():
    """A measured figure has a decimal point or a percent sign; settings have neither.
    Sections, equations and exponents are left out."""
    for page in (
        make_tables.RESULTS.parent / "README.md",
        *make_tables.RESULTS.glob("*.md"),
    ):
        text = page.read_text()
        prose = re.sub(r"(?s)<!-- begin (\S+) -->.*?<!-- end \1 -->", "", text)
        prose = re.sub(r"`[^`]*`|section \d\.\d", "", prose)
        assert re.findall(r"\d+\.\d+|\d+ ?%", prose) == [], page


def test_the_main_results_are_figures_of_the_records():
    lines = main_results.markdown(make_tables.RESULTS).splitlines()
    assert len(lines) == 2 + len(main_results.ROWS)
    table5 = json.loads((make_tables.RESULTS / "table5_bottleneck.json").read_text())
    rows = {row["name"]: row for row in table5["rows"]}
    int4, plain = rows["int4 both ways"], rows["baseline"]
    faster = plain["speed"]["seconds"] / int4["speed"]["seconds"]
    (line,) = (line for line in lines if "4-bit numbers both ways" in line)
    apart = list(int4["held_out"]["difference"].values())
    error = statistics.stdev(apart) / len(apart) ** 0.5
    loss = f"loss {statistics.fmean(apart):+.3f} ± {error:.3f} nats"
    assert f"| {faster:.1f} times the steps a second | {loss} | {len(apart)} |" in line


def test_only_what_is_between_the_markers_changes():
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    new = make_tables.rewrite(text, "x", "new\n")
    assert new == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"
    with pytest.raises(errors.NebulaError, match="no markers for y"):
        make_tables.rewrite(text, "y", "new")


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has a page, beside the results."""
    page = "<!-- begin xnli_run -->\n<!-- end xnli_run -->\n"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "xnli_run.md").write_text(page)
    (tmp_path / "xnli_run").mkdir()
    return tmp_path / "xnli_run"


def test_a_run_that_is_unfinished_or_was_resumed_is_not_collected(run, tmp_path):
    """The times of a resumed run of clusters are partial."""
    with pytest.raises(errors.NebulaError, match=r"no summary\.json"):
        make_tables.collect(run, tmp_path / "results")
    summary = {"commit": "abc123", "clusters": [{"first_step": 5}]}
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(errors.NebulaError, match="was resumed"):
        make_tables.collect(run, tmp_path / "results")


def test_a_run_that_no_page_has_a_place_for_is_not_collected(run, tmp_path):
    """Its record would stop all tables from being written."""
    results = tmp_path / "results"
    for name, message in (
        ("other", r"other\.json: a record's name begins with m3_"),
        ("xnli_other", "there is no page .*xnli_other"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text("{}")
        with pytest.raises(errors.NebulaError, match=message):
            make_tables.collect(tmp_path / name, results)
    assert not list(results.glob("*.json"))


def test_a_run_is_collected_under_the_name_of_its_folder_with_its_own_picture(
    run, tmp_path, monkeypatch
):
    (run / "summary.json").write_text(json.dumps({"commit": "abc123"}))
    (run / "losses.png").write_text("new")
    monkeypatch.chdir(run)
    results = tmp_path / "results"
    assert make_tables.collect(pathlib.Path("."), results) == "xnli_run"
    assert [path.name for path in results.glob("*.json")] == ["xnli_run.json"]
    assert (results / "xnli_run.png").read_text() == "new"
    (run / "losses.png").unlink()
    make_tables.collect(run, results)
    assert not (results / "xnli_run.png").exists()


def test_a_run_is_collected_without_its_examples_of_a_clean_commit_alone(run, tmp_path):
    results = tmp_path / "results"
    for commit, is_clean in (
        *(("abc123+", False), ("unknown", False), ("abc123, def456+", False)),
        *(("abc123", True), ("abc123, def456", True)),
    ):
        summary = {
            "commit": commit,
            "training": {"first_step": 5},
            "examples": ["somebody's sentence"],
        }
        (run / "summary.json").write_text(json.dumps(summary))
        if not is_clean:
            with pytest.raises(errors.NebulaError, match="not a clean checkout"):
                make_tables.collect(run, results)
    assert make_tables.collect(run, results) == "xnli_run"
    kept = json.loads((results / "xnli_run.json").read_text())
    assert kept == {"commit": "abc123, def456", "training": {"first_step": 5}}
