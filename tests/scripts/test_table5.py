import copy
import functools
import json
from unittest import mock

import held_out_scores
import pytest
import tiny_tables
from absl.testing import flagsaver

from experiments.abnet import evaluation
from nebula_jax.communication import codecs, wan
from nebula_jax.evaluation import bleu, sentence_scores
from scripts import table5_compression
from scripts.tables import abnet as abnet_runs
from scripts.tables import compression_rows, held_out, pictures, sweep
from scripts.tables import runs as table_runs

SETTINGS = {"steps": "160", "batch_size": "16"}
SETTINGS |= {"micro_batches": "2", "length_buckets": "12"}
PADDED = 1000.0
LINE = {"wan": "8kbit,5ms", "rate": 8000.0, "delay": 0.005}
LINE |= {"factor": 0.3, "compute_seconds": 0.1, "padded_bits": 8000}
FEW_SAMPLES = functools.partial(bleu.paired_bootstrap, samples=50)  # sooner drawn
FAST = {"forward": 100.0, "backward": 50.0}  # bytes a step of a row that compresses


class Stub:
    """Leaves behind what the real command would; counts."""

    def __init__(self):
        self.names = []

    def __call__(self, run, workdir):
        self.names.append(run.name)
        arguments = dict(
            each.removeprefix("--").split("=", 1) for each in run.arguments
        )
        is_whole = arguments["cluster"] == "whole"
        is_plain = arguments["forward_codec"] == "identity"
        names = ["whole"] if is_whole else ["target", "source"]
        seed = int(arguments["seed"])
        sizes = FAST if not is_plain else {"forward": PADDED, "backward": PADDED}
        summary = {
            "commit": "abc123",
            "seconds": 60.0,
            "clusters": [
                {"cluster": name, "last_step": 10, "width": 32, "sent": {}}
                for name in names
            ],
            "bytes": {} if is_whole else {"padded": PADDED},
            "bleu": [{"step": 10, "dev": 9.0, "test": 20.0 - (not is_plain) + seed}],
            "examples": ["a sentence of somebody's"],
        }
        if arguments.get("held_out_pairs") != "0":
            summary["held_out"] = {"step": 10}
            # Half of 40 sentences are right, and two more without a codec.
            scores = held_out_scores.scores(
                [number < 20 + 2 * is_plain for number in range(40)],
                nats=10.0 + seed + 0.5 * (1 + seed) * (not is_plain),
            )
            folder = workdir / "target" / "translations"
            folder.mkdir(parents=True)
            path = evaluation.scores_path(folder, 10)
            path.write_text(sentence_scores.dumps(scores), "utf-8")
        (workdir / "summary.json").write_text(json.dumps(summary))
        for name in names:
            (workdir / name).mkdir(exist_ok=True)
            records = [
                {
                    "step": step,
                    "time": 100.0 + step * (1.0 if is_plain else 0.125),
                    **({} if name == "source" else {"loss": 5.0 - 0.1 * step - seed}),
                    "bytes_sent": 77 + step * sizes["forward"],
                    "bytes_received": 7 + step * sizes["backward"],
                }
                for step in range(1, 21)
            ]
            records.append({"step": 20, "time": 999.0, "held_back_bleu": {}})
            text = "".join(json.dumps(record) + "\n" for record in records)
            (workdir / name / "metrics.jsonl").write_text(text)


def run_all(folder, stub):
    stored = table_runs.Runs(folder, abnet_runs.figures, stub)
    with (
        flagsaver.flagsaver(rows=[]),
        mock.patch.object(table5_compression, "line_of", return_value=LINE),
        mock.patch.object(held_out.bleu, "paired_bootstrap", FEW_SAMPLES),
    ):
        table = tiny_tables.table(scale="tiny")
        found = table5_compression.record(stored, table)
    return stored.provenance(["0", "1"]) | found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a table whose runs have all ended, their names, its record."""
    folder, stub = tmp_path_factory.mktemp("table"), Stub()
    return folder, stub.names, run_all(folder, stub)


@pytest.fixture
def result(made):
    return copy.deepcopy(made[-1])


def test_the_papers_ten_rows_and_ours_are_legal_codecs():
    rows = compression_rows.rows()
    assert [row.name for row in rows if not row.is_ours] == list(sweep.PAPER["table5"])
    late = [row for _, row in compression_rows.starts(SETTINGS)]
    for row in rows + late:
        if row.is_ours:  # padding never crosses
            assert "pack_tokens" in row.forward
            assert "pack_tokens" in row.backward
    for text in {text for row in rows + late for text in (row.forward, row.backward)}:
        codecs.from_string(text)
    assert len({compression_rows.file_name(row.name) for row in rows}) == len(rows)
    assert not any("," in row.name for row in rows)  # --rows is a list of them


def test_every_run_is_done_once(made):
    (folder, names, result), second = made, Stub()
    rows = compression_rows.rows()
    starts = compression_rows.STARTS
    assert len(names) == 3 * len(rows) + 2 * len(starts)
    again = run_all(folder, second)
    assert second.names == []
    assert {**again, "command": ""} == {**result, "command": ""}
    assert [start["step"] for start in result["starts"]] == [10, 20, 80]


def test_no_text_is_kept(made):
    for path in (made[0] / "results").glob("quality*.json"):
        text = path.read_text()
        assert "somebody" not in text
        assert json.loads(text)["held_out"].count("\n") == 41


def test_time_bytes_speed_and_ideal_are_the_hand_computed_ones(result):
    rows = {row["name"]: row for row in result["rows"]}
    plain, int8 = rows["baseline"]["speed"], rows["FP16+INT8"]["speed"]
    # The line takes 1000 bytes a second and 5 ms each way; a step computes for 0.1 s.
    sizes = {"forward": PADDED, "backward": PADDED}
    assert plain == sizes | {"seconds": 1.0, "ideal": 1.0, "with_round_trip": 1.01}
    ideal = {"ideal": pytest.approx(0.1), "with_round_trip": pytest.approx(0.11)}
    assert int8 == FAST | ideal | {"seconds": 0.125}
    slow = LINE | {"compute_seconds": 0.2}
    assert table5_compression.ideal_seconds(int8, slow) == 0.2
    assert rows["baseline"]["bleu"] == [20.0, 21.0]
    assert rows["FP16+INT8"]["bleu"] == [19.0, 20.0]


def test_the_wire_weighs_what_it_weighed_in_the_paper():
    found = table5_compression.scaled_line(2.0, 40_000_000)
    lines = wan.from_string(found["wan"])
    assert lines.up == lines.down
    wire = found["padded_bits"] / lines.up.rate
    assert wire == pytest.approx(10 * 2.0, rel=1e-3)
    # 201.3 Mbit at 60 Mbit/s; a tenth of it is the paper's compute.
    paper = table5_compression.PAPER_COMPUTE
    assert 10 * paper == pytest.approx(3.355, abs=1e-3)
    assert found["factor"] == pytest.approx(2.0 / 0.3355, rel=1e-3)
    assert lines.up.delay == pytest.approx(0.015 * found["factor"], rel=1e-2)
    found = table5_compression.scaled_line(paper, table5_compression.PAPER_BITS)
    assert wan.from_string(found["wan"]).up == wan.Line(60e6, 0.015)


def test_the_line_is_of_the_baselines_median_step_in_one_process():
    """Of steps of 0.5 s, of which the first compiles and the third evaluates."""
    times = {2: 30.0, 4: 31.0, 6: 55.0, 8: 56.0, 10: 57.0}
    plain = {
        "summary": {"clusters": [{"cluster": "whole", "width": 32}]},
        "records": [{"step": step, "time": at} for step, at in times.items()],
    }
    found = table5_compression.line_of(plain, SETTINGS)
    assert found == table5_compression.scaled_line(0.5, 16 * 12 * 32 * 32)


@pytest.mark.parametrize(
    ("codec", "want"),
    [
        ("identity", 1.0),
        ("fp16", 0.5),
        ("int8(tensor)", 0.25),
        # k = floor(0.6 x 12) = 7 of 12 x 32: 7 (12 + 32) / (12 x 32) / 2
        ("svd(0.6)|fp16", 7 * 44 / 384 / 2),
        ("pack_tokens|fp16", None),
    ],
)
def test_the_formulas_ratio(codec, want):
    got = table5_compression.formula_ratio(codec, SETTINGS, width=32)
    assert got == (want if want is None else pytest.approx(want, rel=0.01))


def test_held_out_loss_and_bleu_are_beside_the_baseline(result, tmp_path):
    """Losses are 2 and 2.2 nats a token; a codec adds 0.1 with seed 0, 0.2 with 1."""
    rows = {row["name"]: row["held_out"] for row in result["rows"]}
    assert rows["baseline"].keys() == {"sentences", "loss", "bleu"}
    assert rows["baseline"]["loss"] == pytest.approx({"0": 2.0, "1": 2.2})
    int4 = rows["int4 both ways"]
    assert int4["difference"] == pytest.approx({"0": 0.1, "1": 0.2})
    bleu = [row["bleu"]["0"] for row in (rows["baseline"], int4)]
    assert int4["bleu_difference"]["difference"] == pytest.approx(bleu[1] - bleu[0])
    assert int4["bleu_difference"]["difference"] < 0
    for start in result["starts"]:
        assert start["held_out"]["difference"] == pytest.approx({"0": 0.1, "1": 0.2})
    pictures.table5(result, tmp_path / "t.json")
    assert (tmp_path / "t_fig10.png").is_file()
