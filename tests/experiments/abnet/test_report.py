"""The report of a translation's run."""

import json
import os

from experiments import train_abnet
from nebula_jax.face import report as face_report

SETTINGS = {
    **{"batch_size": 8, "objective": "ar", "length_buckets": (8,)},
    **{"forward_codec": "", "backward_codec": "", "pair": "es-en", "seed": 0},
}


def test_a_report_is_of_the_clusters_that_were_asked_for(tmp_path, capsys):
    """One process and clusters may have run in a folder, each by its own."""
    for name, speed in (("whole", 700.0), ("target", 900.0)):
        folder = tmp_path / name
        folder.mkdir()
        summary = {
            **{"cluster": name, "first_step": 1, "last_step": 4, "seconds": 7.0},
            **{"tokens": 9, "tokens_per_second": speed, "waited_seconds": 0.0},
            **{"bytes_sent": 0, "bytes_received": 0, "trained_parameters": 3},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        records = [{"step": step, "loss": 9.0 / step} for step in (1, 4)]
        scores = {"held_out_bleu": {"dev": 7.0}, "held_out_ceiling": {"dev": 91.26}}
        records.append({"step": 4, **scores})
        lines = "".join(json.dumps(each) + "\n" for each in records)
        (folder / "metrics.jsonl").write_text(lines)
        os.utime(folder / "summary.json", (1, 1))

    def shown(name):
        clusters = {name: tmp_path / name}
        of = train_abnet.EXPERIMENT.report
        face_report.report(
            tmp_path,
            clusters,
            {"flags": SETTINGS},
            2.0,
            curves=of.curves,
            figures=of.figures,
            markdown=of.markdown,
        )
        return capsys.readouterr().out

    assert "| whole |" in shown("whole")
    first = shown("target")
    assert "| target |" in first
    assert "| whole |" not in first
    assert "BLEU of the references themselves" in first
    assert "dev 91.3" in first
    assert shown("target") == first
    # This command has trained nothing: the seconds are those of the training.
    shown("whole")
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"] == 7.0
