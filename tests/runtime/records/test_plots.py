import sys

import matplotlib.figure
import numpy as np

from nebula_jax.runtime.records import plots, report


def test_a_run_without_matplotlib_ends_and_says_that_it_drew_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    summary, picture = tmp_path / "summary.json", tmp_path / "losses.png"
    summary.write_text("{}")
    plots.draw([plots.Panel("Loss", "nats", {"all": [(1, 2.0)]})], picture)
    report.print_paths(summary, picture)
    told = capsys.readouterr()
    assert told.err.startswith("no curves were drawn: ")
    assert "nebula_jax[plots]" in told.err
    assert told.out == f"report: {summary}\n"


def test_many_curves_are_named_at_their_ends_and_no_name_is_over_another():
    names = [f"l{n}" for n in range(15)]
    curves = {name: [(1, 0.5), (2, 0.8 + n / 1000)] for n, name in enumerate(names)}
    panel = plots.Panel("AUC", "", curves, {"": 0.5}, has_mean=True)
    (axes,) = plots.drawn([panel]).axes
    shown = {each.get_text(): each.xyann[1] for each in axes.texts}
    assert set(shown) == {*names, "mean"}
    places = sorted(shown.values())
    assert places[0] >= 0.0
    assert places[-1] <= 1.0
    assert min(np.diff(places)) >= plots.LABEL_HEIGHT - 1e-9
    assert sorted(names, key=shown.get) == names  # as the lines end
    mean = next(line for line in axes.lines if line.get_label() == "mean")
    np.testing.assert_allclose(mean.get_ydata(), [0.5, 0.807])
    assert axes.get_legend() is None


def test_a_panel_without_a_point_is_left_out_where_others_have_some():
    empty = plots.Panel("Probes", "", {"a": []})
    full = plots.Panel("Loss", "nats", {"a": [(1, 2.0)]})
    (axes,) = plots.drawn([empty, full]).axes
    assert axes.get_title() == "Loss"
    assert plots.drawn([empty]).axes


def test_names_beside_points_are_inside_and_none_is_over_another_or_a_point():
    figure = matplotlib.figure.Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    points = [(x, x * y) for x in (1.0, 2.0, 2.1, 3.0) for y in (1.0, 1.05, 2.0)]
    axes.plot(*zip(*points, strict=True), "o")
    plots.label_points(
        axes, [(*each, f"{each[0]}-{n}", "k") for n, each in enumerate(points)]
    )
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    frame = axes.get_window_extent()
    for number, box in enumerate(boxes):
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
        assert not any(box.overlaps(other) for other in boxes[:number])
        assert not box.count_contains(axes.transData.transform(points))
