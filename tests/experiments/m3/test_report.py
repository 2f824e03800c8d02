import json
import pathlib

from experiments.m3 import report

QUICKSTART = (
    pathlib.Path(__file__).parents[3] / "experiments/results/m3_quickstart.json"
)


def test_a_generator_that_was_cut_off_is_named_with_what_waited():
    summary = json.loads(QUICKSTART.read_text())
    calm = {"count": 0, "seconds": 0.0, "tensors": 0, "bytes": 0}
    cut = {"count": 2, "seconds": 7.25, "tensors": 9, "bytes": 4_200_000}
    for each, outages in zip(summary["clusters"], ({}, calm, cut), strict=False):
        each["outages"] = outages
    block = report.markdown(summary)
    assert block.count("lost its line") == 1
    assert (
        "generator:1 lost its line 2 times, for 7.2 s in all. At most 9 tensors of 4.2"
        " MB waited for it." in block
    )


def probe(step, gap, **more):
    """The probes of an evaluation in two languages."""
    nearest = {"de": 1.0, "sw": 0.5}
    gaps = {"de": gap + 0.01, "sw": gap - 0.01}
    return {"step": step, "translation_gap": gaps, "retrieval": nearest, **more}


def test_a_spoiled_encoder_and_generators_that_learn_nothing_are_named():
    summary = {
        "flags": {"hot_start": "e5-small"},
        "probes": [probe(0, 0.147), probe(50, 0.14), probe(100, 0.05)],
        "generators": [
            {"name": "generator:0", "loss": 7.15, "unigram_entropy": 7.2},
            {"name": "generator:1", "loss": 5.0, "unigram_entropy": 7.2},
            {"name": "generator:2", "loss": None, "unigram_entropy": None},
        ],
    }
    generator, encoder = report.warnings(summary)
    assert "generator:0 is no better than word frequencies" in generator
    assert "7.15 nats, theirs 7.20" in generator
    assert "(cosine above that of others: 0.147 after step 0, 0.050 now)" in encoder
    summary["flags"]["hot_start"] = ""  # random weights have no geometry to lose
    assert len(report.warnings(summary)) == 1
    summary["flags"]["hot_start"] = "e5-small"
    summary["probes"][-1] = probe(100, 0.134)
    summary["generators"][0]["loss"] = 7.0
    assert report.warnings(summary) == []
    assert report.warnings({}) == []


def test_the_report_has_the_last_probe_beside_the_first():
    """Figures that were not finite are dashes."""
    names = [f"{term}_{part}_gradient" for term in ("rtd", "clm")
             for part in ("encoder", "heads")]  # fmt: skip
    summary = json.loads(QUICKSTART.read_text())
    last = probe(50, 0.131, **dict.fromkeys(names, 1.5))
    summary["probes"] = [probe(0, 0.147), last]
    block = report.markdown(summary)
    assert "is 0.131 (0.147 before), and 75% (75%) are found as the nearest." in block
    assert "RTD 1.5 in the encoder, 1.5 in the heads; CLM 1.5 in the" in block
    last |= dict.fromkeys(names[:2])
    last["translation_gap"]["sw"] = None
    block = report.markdown(summary)
    assert "is – (0.147 before), and 75% (75%) are found as the nearest." in block
    assert "RTD – in the encoder, – in the heads; CLM 1.5 in the" in block
    for each in summary["held_out"][-1]["languages"].values():
        each["unigram_accuracy"] = 0.077
    assert "% (7.7%)" in report.markdown(summary)
    assert "no better than always answering" not in report.markdown(summary)
    for each in summary["held_out"][-1]["languages"].values():
        each["unigram_accuracy"] = each["clm_accuracy"]
    assert "no better than always answering" in report.markdown(summary)


def test_generators_are_found_in_one_process_and_in_several():
    records = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, {"step": 2, "x": 1}]
    apart = report.of_generators(
        {"generator:0": {"unigram_entropy": 7.0}},
        {"discriminator": records, "generator:0": records},
    )
    assert apart == [("generator:0", 7.0, [(1, 9.0), (2, 8.0)])]
    records = [{"step": 1, "loss": 50.0, "generator_0_loss": 9.0}]
    whole = report.of_generators(
        {"whole": {"unigram_entropies": [7.0]}}, {"whole": records}
    )
    assert whole == [("generator:0", 7.0, [(1, 9.0)])]
