"""The report of a run, made of the files that its clusters leave."""

import json
import os

from nebula_jax.face import report as face_report
from nebula_jax.runtime.records import report


def test_a_report_is_of_the_clusters_that_were_asked_for(tmp_path, capsys):
    """One process and clusters may have run in a folder, each by its own."""
    for name in ("whole", "target"):
        summary = {
            **{"cluster": name, "first_step": 1, "last_step": 4, "seconds": 7.0},
            **{"tokens_per_second": 700.0, "waited_seconds": 0.0},
            **{"bytes_sent": 0, "bytes_received": 0},
        }
        report.write(tmp_path / name / "summary.json", summary)
        records = [{"step": step, "loss": 9.0 / step} for step in (1, 4)]
        lines = "".join(json.dumps(each) + "\n" for each in records)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
        os.utime(tmp_path / name / "summary.json", (1, 1))

    def shown(name):
        clusters = {name: tmp_path / name}
        face_report.report(tmp_path, clusters, {"flags": {}}, 2.0)
        return capsys.readouterr().out

    assert "| whole |" in shown("whole")
    first = shown("target")
    assert "| target |" in first
    assert "| whole |" not in first
    assert shown("target") == first
    # This command has trained nothing: the seconds are those of the training.
    shown("whole")
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"] == 7.0
