"""A test that hangs ends, and the others go on; a worker that dies ends the run."""

import pathlib


def test_every_test_has_a_limit(request):
    """Of a quarter of an hour, and of half an hour where it is slow."""
    assert float(request.config.getini("timeout")) == 900
    assert request.config.getini("timeout_method") == "signal"
    for item in request.session.items:
        if item.get_closest_marker("slow"):
            assert item.get_closest_marker("timeout")


def test_no_worker_is_restarted():
    """Restarted workers would wait for ever."""
    settings = pathlib.Path(__file__).parents[1] / "setup.cfg"
    assert "--max-worker-restart=0" in settings.read_text()
