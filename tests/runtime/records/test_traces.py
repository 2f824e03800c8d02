import json

from nebula_jax import trace as trace_lib
from nebula_jax.runtime.records import traces


def summary(cluster, seconds, parts, lines=None):
    time = {"seconds": seconds, "parts": parts, "lines": lines or {}}
    return {"cluster": cluster, "time": time}


def test_shares_of_every_cluster_are_one_table_with_the_rest_last():
    line = {"frames": 1000, "tls": 22, "kernel_sent": 1022, "kernel_received": 5}
    text = traces.markdown(
        [
            summary("d", 10.0, {"compute": 6.0, "other": 4.0}, {"g": line}),
            {"cluster": "untraced"},
            summary("g", 20.0, {"wait": 19.0, "compute": 0.5, "other": 0.5}),
        ]
    )
    assert "| cluster | time | compute | wait | other |" in text
    assert "| d | 10.0 s | 60.0% | 0.0% | 40.0% |" in text
    assert "| g | 20.0 s | 2.5% | 95.0% | 2.5% |" in text
    assert "d to g: 1,000 bytes of frames and 22 of TLS; the kernel sent 1,022." in text
    assert "untraced" not in text


def processes(path):
    """The names of those whose traces a file has."""
    events = json.loads(path.read_text())["traceEvents"]
    return [each["args"]["name"] for each in events if each["name"] == "process_name"]


def test_what_an_earlier_attempt_left_is_not_gathered(tmp_path, capsys):
    """It had two processes in each cluster, then one; then none was traced."""
    folder, trace = tmp_path / "source", trace_lib.Trace(is_on=True)
    trace.write(folder / "trace.json", "source")
    trace.write(folder / "trace-1.json", "source/1")
    traces.gather(tmp_path, [folder], 2)
    assert processes(tmp_path / "trace.json") == ["source", "source/1"]
    traces.gather(tmp_path, [folder], 1)
    assert processes(tmp_path / "trace.json") == ["source"]
    assert "open it in ui.perfetto.dev" in capsys.readouterr().out
    traces.gather(tmp_path, [folder], 0)
    assert not capsys.readouterr().out
