import json
import pathlib
import re
import statistics

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.m3 import report as m3_report
from nebula_jax import errors
from nebula_jax.runtime.records import report
from scripts import make_tables
from scripts.tables import held_out, main_results

SUMMARY = {
    "command": "python -m experiments.pretrain_m3 --flagfile=f.flags",
    "commit": "abc123",
    "hardware": {"cpu": "a CPU", "cores": 2, "python": "3.11.7", "jax": "0.10.2"},
    "seconds": 90.0,
    "vocab_size": 4000,
    "flags": {"seed": 7},
    "bytes": {
        "frames": 20, "per_position": 1.9, "formula_per_position": 1.8,
        "per_token": 2.2,
    },
    "losses": {"discriminator": {"first": 40.0, "last": 20.5}},
    "clusters": [
        {
            "cluster": "discriminator",
            "first_step": 1,
            "last_step": 10,
            "tokens_per_second": 1234.5,
            "bytes_sent": 1_000_000,
            "bytes_received": 2_500_000,
            "waited_seconds": 1.0,
            "seconds": 4.0,
        }
    ],
    "held_out": [
        {"step": step, "languages": {"en": {
            "rtd_auc": auc, "fake_token_rate": fakes,
            "sampled_mlm_accuracy": 0.05, "clm_accuracy": 0.1,
        }}}
        for step, auc, fakes in ((0, 0.5, 0.14), (10, 0.75, 0.15))
    ],
}  # fmt: skip


def test_the_committed_readme_is_what_the_script_makes_of_the_results():
    committed = (make_tables.EXPERIMENTS / "README.md").read_text()
    message = "run: scripts/run python -m scripts.make_tables"
    assert make_tables.readme() == committed, message
    for name in ("m3_quickstart", "m3_xnli15_tiny"):
        block = committed.partition(f"<!-- begin {name} -->")[2].partition("<!--")[0]
        assert block.count("\n| ") > 15, f"no results of {name}"


def test_a_block_holds_command_commit_hardware_time_seed_and_every_figure():
    block = m3_report.markdown(SUMMARY)
    for part in (
        "--flagfile=f.flags",
        "Commit abc123, seed 7, 2 cores of a CPU",
        "1.5 minutes",
        "| discriminator | 10 | 40.000 → 20.500 | 1,234 | 1.0 MB | 2.5 MB | 25% |",
        "| en | 0.750 (0.500) | 15.0% (14.0%) | 5.0% | 10.0% |",
    ):
        assert part in block


def test_the_file_has_the_markdown_that_a_terminal_has_and_the_records_pictures(
    tmp_path, capsys
):
    report.write(tmp_path / "m3_run.json", SUMMARY)
    (tmp_path / "m3_run.png").touch()
    block = make_tables.block("m3_run", tmp_path)
    report.show(m3_report.markdown(SUMMARY))
    printed = capsys.readouterr().out
    assert block == printed + "\n![Curves of m3_run](results/m3_run.png)\n"


def test_the_figures_of_table_5_stand_under_it():
    found = make_tables.block("table5_tiny", make_tables.EXPERIMENTS / "results")
    pictures = [line for line in found.splitlines() if line.startswith("![")]
    assert pictures == [
        "![Fig. 9: training loss](results/table5_tiny_fig9.png)",
        "![Fig. 10: first compressed step](results/table5_tiny_fig10.png)",
        "![Quality against bytes](results/table5_tiny_bytes.png)",
    ]


def test_a_record_of_an_unknown_kind_is_named(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(errors.NebulaError, match=r"other\.json: .* begins with m3_"):
        make_tables.block("other", tmp_path)


def test_no_measured_figure_is_typed_by_hand():
    """A measured figure has a decimal point or a percent sign; settings have neither.

    Sections, equations and exponents are left out.
    """
    text = (make_tables.EXPERIMENTS / "README.md").read_text()
    prose = re.sub(r"(?s)<!-- begin (\S+) -->.*?<!-- end \1 -->", "", text)
    prose = re.sub(r"`[^`]*`|section \d\.\d", "", prose)
    assert re.findall(r"\d+\.\d+|\d+ ?%", prose) == []


def test_the_main_results_are_figures_of_the_records():
    results = make_tables.EXPERIMENTS / "results"
    lines = main_results.markdown(results).splitlines()
    assert len(lines) == 2 + len(main_results.ROWS)
    table5 = json.loads((results / "table5_bottleneck.json").read_text())
    rows = {row["name"]: row for row in table5["rows"]}
    int4, plain = rows["int4 both ways"], rows["baseline"]
    faster = plain["speed"]["seconds"] / int4["speed"]["seconds"]
    line = line_of("\n".join(lines), "4-bit numbers both ways")
    assert f"{faster:.1f} times as many steps" in line
    bleus = [statistics.fmean(each) for each in held_out.bleus([int4, plain])]
    assert f"BLEU {bleus[0]:.1f} against {bleus[1]:.1f}" in line
    sections = (make_tables.EXPERIMENTS / "README.md").read_text()
    for row in main_results.ROWS:
        assert f"](experiments/README.md#{row.record}) |" in "\n".join(lines)
        assert f"\n## {row.record}\n" in sections  # where the link leads


def test_an_auc_that_is_not_there_is_no_number_of_the_main_results():
    aucs = {"en": 0.75, "ur": None, "sw": 0.5}
    last = {name: {"rtd_auc": auc} for name, auc in aucs.items()}
    text = main_results._m3({"held_out": [{"step": 9, "languages": last}]})
    assert text.startswith("AUC – (0.50 to 0.75) after 9 steps")


def test_the_main_results_have_held_out_losses_if_the_records_do(tmp_path):
    """With the difference, its error over seeds, and the interval of BLEU's."""
    results = make_tables.EXPERIMENTS / "results"
    for path in results.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, kind, what in (
        ("table5_bottleneck", "name", "4-bit numbers"),
        ("table2_tiny", "method", "ABNet-Cloud"),
    ):
        record = json.loads((results / f"{name}.json").read_text())
        for row in record["rows"]:
            rows = row["pairs"] if kind == "method" else [row]
            for each in rows:
                each.pop("held_out", None)
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
        old = line_of(main_results.markdown(tmp_path), what)
        assert "held-out loss" not in old
        assert "BLEU" in old
        for row in record["rows"]:
            is_plain = row[kind] in ("baseline", "ABNet")
            about = {"bleu": {"0": 20.0 + is_plain, "1": 22.0, "2": 21.0}}
            if not is_plain:
                about["difference"] = {"0": 0.01, "1": 0.02, "2": 0.03}
                about["bleu_difference"] = {"difference": -0.3, "low": -1, "high": 0.4}
            for each in row["pairs"] if kind == "method" else [row]:
                each["held_out"] = about
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
        line = line_of(main_results.markdown(tmp_path), what)
        assert "held-out loss +0.020 ± 0.006 nats, BLEU 21.0 against 21.3" in line
        assert ", -0.30 (-1.00 to +0.40) (3 seeds)" in line


def test_the_main_results_bear_benchmarks_that_measured_a_part(tmp_path):
    """Without PyTorch, and with `--transports=tcp,bridge`."""
    results = make_tables.EXPERIMENTS / "results"
    for path in results.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    training = json.loads((results / "bench_training.json").read_text())
    for each in training["measured"]:
        for step in each["steps"]:
            step |= {"over_pytorch": None, "over_same": None}
    (tmp_path / "bench_training.json").write_text(json.dumps(training))
    bridge = json.loads((results / "bench_bridge.json").read_text())
    for name in set(bridge["transports"]) - {"tcp", "bridge"}:
        del bridge["transports"][name]
    bridge["targets"] = [
        each for each in bridge["targets"] if each["what"].startswith("bridge:")
    ]
    (tmp_path / "bench_bridge.json").write_text(json.dumps(bridge))
    xnli = json.loads((results / "xnli_recipe.json").read_text())
    (tmp_path / "xnli_recipe.json").write_text(json.dumps(xnli | {"rows": []}))
    table = main_results.markdown(tmp_path)
    assert "| – |" in line_of(table, "A small encoder fine-tuned")
    line = line_of(table, "A bfloat16 training step")
    assert "| – to – times PyTorch's float32 rate, – to – times its" in line
    line = line_of(table, "The bridge beside bare sockets")
    assert " of TCP's throughput, – of TLS's; a round trip of – µs with TLS |" in line


def test_no_page_is_written_if_one_cannot_be_made(tmp_path, monkeypatch):
    def front_page():
        raise errors.NebulaError("no such figure")

    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    monkeypatch.setattr(make_tables, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(make_tables, "readme", lambda: "new")
    monkeypatch.setattr(make_tables, "front_page", front_page)
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(collect=""), pytest.raises(errors.NebulaError):
        make_tables.main()
    assert not list(tmp_path.iterdir())


def line_of(table, what):
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {what}"))
    return line


def test_the_front_page_has_the_main_results_if_it_has_their_markers(tmp_path):
    (tmp_path / "experiments").mkdir()
    results = make_tables.EXPERIMENTS / "results"
    (tmp_path / "experiments" / "results").symlink_to(results)
    page = tmp_path / "README.md"
    page.write_text("a page")
    assert make_tables.front_page(tmp_path) == "a page"
    page.write_text("a\n<!-- begin results -->\nold\n<!-- end results -->\nb\n")
    text = make_tables.front_page(tmp_path)
    assert text.startswith("a\n<!-- begin results -->\n| what | result |")
    assert text.endswith("|\n<!-- end results -->\nb\n")
    assert "old" not in text


def test_the_committed_front_page_is_what_the_script_makes_of_the_results():
    committed = (make_tables.ROOT / "README.md").read_text()
    assert make_tables.front_page() == committed


def test_only_what_is_between_the_markers_changes():
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    new = make_tables.rewrite(text, "x", "new\n")
    assert new == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"
    with pytest.raises(errors.NebulaError, match="no file has markers for y"):
        make_tables.rewrite(text, "y", "new")


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has markers, beside the results."""
    page = "<!-- begin xnli_run -->\n<!-- end xnli_run -->\n"
    (tmp_path / "README.md").write_text(page)
    (tmp_path / "xnli_run").mkdir()
    return tmp_path / "xnli_run"


def test_an_unfinished_run_is_not_collected(run, tmp_path):
    with pytest.raises(errors.NebulaError, match=r"no summary\.json"):
        make_tables.collect(run, tmp_path / "results")


def test_a_resumed_run_of_clusters_is_not_collected_as_its_times_are_partial(
    run, tmp_path
):
    trained = SUMMARY["clusters"][0] | {"first_step": 5}
    summary = SUMMARY | {"clusters": [trained]}
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(errors.NebulaError, match="was resumed"):
        make_tables.collect(run, tmp_path / "results")


def test_a_run_that_no_page_has_a_place_for_is_not_collected(run, tmp_path):
    """Its record would stop all tables from being written."""
    results = tmp_path / "results"
    for name, message in (
        ("other", r"other\.json: a record's name begins with m3_"),
        ("xnli_other", "no file has markers for xnli_other"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(SUMMARY))
        with pytest.raises(errors.NebulaError, match=message):
            make_tables.collect(tmp_path / name, results)
    assert not results.exists()


def test_a_run_is_collected_under_the_name_of_its_folder(run, tmp_path, monkeypatch):
    summary = {"commit": "abc123"}
    (run / "summary.json").write_text(json.dumps(summary))
    monkeypatch.chdir(run)
    results = tmp_path / "results"
    assert make_tables.collect(pathlib.Path("."), results) == "xnli_run"
    assert [path.name for path in results.iterdir()] == ["xnli_run.json"]


def test_a_collected_run_without_a_picture_does_not_keep_an_older_ones(run, tmp_path):
    (run / "summary.json").write_text(json.dumps({"commit": "abc123"}))
    (run / "losses.png").write_text("new")
    results = tmp_path / "results"
    make_tables.collect(run, results)
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
