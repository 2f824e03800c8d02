import json
import pathlib

from experiments.m3 import report

QUICKSTART = (
    pathlib.Path(__file__).parents[3] / "experiments/results/m3_quickstart.json"
)


def test_a_generator_that_was_cut_off_is_named_with_what_waited():
    summary = json.loads(QUICKSTART.read_text())
    calm = {"count": 0, "seconds": 0.0, "tensors": 0, "bytes": 0, "bytes_on_disk": 0}
    cut = {"count": 2, "seconds": 7.25, "tensors": 9, "bytes": 4_200_000}
    for each, outages in zip(summary["clusters"], ({}, calm, cut), strict=False):
        each["outages"] = outages | ({"bytes_on_disk": 1_100_000} if outages else {})
    block = report.markdown(summary)
    assert block.count("lost its line") == 1
    assert (
        "generator:1 lost its line 2 times, for 7.2 s in all. At most 9 tensors of 4.2"
        " MB waited for it, 1.1 MB of them on disk." in block
    )
