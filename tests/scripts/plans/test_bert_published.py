"""Published figures, and the cost model beside them."""

import pytest

from scripts.plans import bert, bert_published

PARAMETERS = 335_174_458


@pytest.fixture(scope="module")
def record():
    return bert.record()


def test_the_first_paper_has_its_abstracts_figure_and_no_other(record):
    (run,) = (each for each in record["published"] if "2008.00177" in each["source"])
    assert run["hours"] == 12 * 24
    assert (run["model"], run["devices"]) == ("BERT", 0)
    assert run["device_hours"] is run["utilization"] is None
    text = bert_published.markdown(record)
    line = next(each for each in text.splitlines() if "2008.00177" in each)
    assert "| not in the abstract | 288 | – | – |" in line


def test_device_hours_and_their_source(record):
    assert all(each["source"] for each in record["published"])
    found = {each["name"]: each for each in record["published"]}
    assert found["1 x DGX-1"]["device_hours"] == pytest.approx(8 * 153.16)
    assert found["64 x DGX-2H"]["devices"] == 1024
    assert found["MosaicBERT, to GLUE 79.6"]["device_hours"] == pytest.approx(9.04)


def test_utilization_by_hand():
    run = bert_published.DGX_1[0]
    # 8 devices of 125 TFLOP/s for 153.16 h have 5.51376e20 FLOP.
    assert bert_published.utilization(run, 5.51376e20) == pytest.approx(1, rel=1e-9)
    # The planned share of a V100-class device is about what was published.
    used = bert_published.utilization(run, bert.LARGE.flops)
    assert bert.LARGER.utilization == pytest.approx(used, abs=0.02)


def test_weak_scaling_by_hand_and_within_a_tenth_of_the_published():
    rows = bert_published.scaling(PARAMETERS)
    found = {(each["system"], each["length"], each["nodes"]): each for each in rows}
    assert len(found) == 10
    # 8 x 16 sequences in 0.1464 s; 1.0055 GB at 50 GB/s, and 6 hops.
    alone = 128 / 874.24
    ring = 2 * 3 / 4 * 2 * PARAMETERS / 50e9 + 6 * 10e-6
    four = found["DGX-1", 128, 4]
    assert four["planned"] == pytest.approx(4 * alone / (alone + ring))
    assert four["published"] == pytest.approx(3.53, abs=0.005)
    assert found["DGX-1", 128, 16]["published"] == pytest.approx(13.89, abs=0.005)
    assert found["DGX-1", 512, 16]["published"] == pytest.approx(14.02, abs=0.005)
    for each in rows:
        assert each["planned"] == pytest.approx(each["published"], rel=0.1)


def test_hours_by_hand():
    rows = {each["run"]: each for each in bert_published.hours(PARAMETERS, 8_601)}
    found = rows["4 x DGX-1"]
    ring = 2 * 3 / 4 * 2 * PARAMETERS / 50e9 + 6 * 10e-6
    assert found["from_one"] == pytest.approx(153.16 / 4 + 8_601 * ring / 3600)
    # The first two give a constant: what four nodes took beside computing and ring.
    constant = (39.27 - found["from_one"]) * 3600 / 8_601
    assert 0.3 < constant < 0.5
    ring = 2 * 15 / 16 * 2 * PARAMETERS / 50e9 + 30 * 10e-6
    sixteen = 153.16 / 16 + 8_601 * (ring + constant) / 3600
    assert rows["16 x DGX-1"]["from_first_two"] == pytest.approx(sixteen)


def test_a_run_that_was_fitted_is_not_called_predicted(record):
    rows = {each["run"]: each for each in record["hours"]}
    assert rows["64 x DGX-2H"]["from_ends"] is None
    assert rows["4 x DGX-2H"]["from_first_two"] is None
    assert all(rows[name]["from_one"] is None for name in ("1 x DGX-1", "1 x DGX-2H"))
    # Computing and the ring alone are too little, for every run.
    assert all(
        each["from_one"] < each["published"]
        for each in rows.values()
        if each["from_one"]
    )
    text = bert_published.markdown(record)
    assert "| 4 x DGX-1 | 39.27 | 38.3 (-2.4%) | given | 39.1 (-0.5%) |" in text
    assert "would have been 219" in text
