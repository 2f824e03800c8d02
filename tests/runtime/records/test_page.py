"""The page of a run, read as a browser would: by its elements."""

import html.parser
import sys

from nebula_jax.runtime.records import page, plots

CLUSTER = {
    "cluster": "generator:0",
    "first_step": 1,
    "last_step": 5,
    "seconds": 10.0,
    "tokens": 50,
    "tokens_per_second": 5.0,
    "bytes_sent": 2_500_000,
    "bytes_received": 100,
    "waited_seconds": 2.5,
    "until_first_step": {"importing": 3.0, "compiling": 20.0},
    "ledger": {"sent tokens": [5, 2_400_000], "received Hello": [1, 100]},
    "certificates_of_peers": {"d": "lab-t"},
}
SUMMARY = {
    "flags": {"wan": "60mbit,15ms", "languages": ["en", "sw"], "note": "<b>|x"},
    "clusters": [
        CLUSTER,
        CLUSTER
        | {
            "cluster": "d",
            "ledger": None,
            "ledgers": {"generator:0": {"sent End": [1, 9]}},
        },
    ],
}
PANEL = plots.Panel("Loss <1>", "nats", {"generator:0": [(1, 2.0), (2, 1.0)]})
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(html.parser.HTMLParser):
    """What a page shows: its text by element, and what it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.fetched, self.rows = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        self.fetched += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith("#")
        ]

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th", "code") and self.rows:
            self.rows[-1].append(data)


def written(tmp_path, **more):
    path = tmp_path / "a run" / "report.html"
    markdown = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    page.of_run(path, SUMMARY, SUMMARY["clusters"], markdown, [PANEL], **more)
    return path.read_text("utf-8")


def test_a_page_needs_no_other_file_and_no_network(tmp_path):
    text = written(tmp_path)
    found = Reader(text)
    assert found.fetched == []
    assert "<script" not in text
    assert "@import" not in text
    assert list(tmp_path.rglob("*")) == [
        tmp_path / "a run",
        tmp_path / "a run/report.html",
    ]


def test_it_has_curves_line_ledger_seconds_settings_and_samples(tmp_path):
    found = Reader(written(tmp_path, samples=["en: a {dog→cat!} sat <i>"]))
    shown = "".join(found.text)
    assert "Loss <1>" in shown  # in the picture, as text
    assert "en: a \u2066{dog→cat!}\u2069 sat <i>" in shown
    assert ["generator:0", "sent tokens", "5", "2.4 MB"] in found.rows
    assert ["d", "generator:0", "sent End", "1", "9 bytes"] in found.rows
    assert ["generator:0", "until the first step: compiling", "20.0 s"] in found.rows
    assert ["generator:0", "of these, waiting for others", "2.5 s"] in found.rows
    assert ["generator:0", "2.000", "0.000", "25%"] in found.rows
    assert ["generator:0", "d", "lab-t"] in found.rows
    assert ["--languages", "en,sw"] in found.rows
    assert ["--note", "<b>|x"] in found.rows
    assert "60mbit,15ms" in shown


def test_without_matplotlib_it_says_so_and_has_the_rest(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = written(tmp_path)
    assert "No curves: matplotlib is missing" in text
    assert "<svg" not in text
    assert "sent tokens" in text


def test_the_line_has_its_curves_where_there_is_a_line():
    records = [
        {"step": n, "sent_mbit": n / 2, "received_mbit": n / 4, "waiting_share": 0.25}
        for n in (1, 2)
    ]
    sent, received, waited = page.line_panels(
        {"g": records, "d": [{"step": 1, "loss": 1.0}]}
    )
    assert sent.curves == {"g": [(1, 0.5), (2, 1.0)], "d": []}
    assert received.curves["g"] == [(1, 0.25), (2, 0.5)]
    assert waited.curves["g"] == [(1, 0.25), (2, 0.25)]
    assert page.line_panels({"whole": [{"step": 1, "sent_mbit": 0.0}]}) == []
    records[0]["sent_mbit"] = 0.0  # the line was cut
    assert page.line_panels({"g": records})[0].curves["g"] == [(1, 0.0), (2, 1.0)]
