"""Trackers, with stand-ins for the services; the calls are those of their own pages."""

import socket
import sys
import time
import types
import urllib.request
from concurrent import futures
from unittest import mock

import ports
import pytest

from nebula_jax import errors, installed
from nebula_jax.runtime.records import trackers

VALUES = {"loss": 2.5, "held_out_auc": {"en": 0.5, "zh-TW": float("nan")}}


@pytest.fixture
def about(tmp_path):
    folder = tmp_path / "m3" / "generator-0"
    folder.mkdir(parents=True)
    text = "# a command\n--steps=5\n--notrace\n--wan=\n--peer=b.example:7\n--job=x\n"
    (folder / "run.flags").write_text(text)
    return trackers.About(tmp_path / "m3", "generator:0", folder)


class Recorder:
    """An object that takes any call, and remembers it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **more):
            self.calls.append((name, args, more))

        return call


def module(monkeypatch, name, **contents):
    made = types.ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)


def test_a_cluster_has_the_same_name_when_it_is_resumed_and_its_settings(about):
    again = trackers.About(about.workdir, about.cluster, about.folder)
    assert about.id == again.id
    assert about.id != about._replace(folder=about.workdir / "generator-1").id
    assert about.settings == {"steps": "5", "notrace": "true"}  # not where it connects
    assert about._replace(folder=about.workdir).settings == {}
    (about.workdir / "run.flags").write_text("--steps=6\n")
    assert about._replace(folder=about.workdir / "b").settings == {"steps": "6"}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_of_a_service_takes_flat_numbers(monkeypatch, about, name):
    run, begun = Recorder(), {}
    init = lambda **given: begun.update(given) or run  # noqa: E731
    module(monkeypatch, name, init=init, Settings=dict)
    made = trackers.opened([name], "", about)
    made.write(7, VALUES)
    made.close()
    assert (begun["group"], begun["resume"]) == ("m3", "allow")
    assert "generator:0" in begun["name"]
    assert begun["config"] == about.settings
    if name == "wandb":  # neither what is printed nor code or machine is sent
        assert begun["settings"]["console"] == "off"
        assert begun["settings"]["disable_git"]
        assert begun["settings"]["x_disable_meta"]
    logged, ended = run.calls[-2:]
    values = logged[1][0]
    assert values["loss"] == 2.5
    assert values["held_out_auc/en"] == 0.5
    assert 7 in (values.get("step"), logged[2].get("step"))
    assert ended == ("finish", (), {})


CLIENTS = []


class Client:
    """MLflow's client, of a server that has no experiment at first."""

    def __init__(self):
        CLIENTS.append(self)
        self.calls = []

    def get_experiment_by_name(self, name):
        made = ("experiment", name) in [call for each in CLIENTS for call in each.calls]
        time.sleep(0.05)  # others come meanwhile
        return types.SimpleNamespace(experiment_id="3") if made else None

    def create_experiment(self, name):
        assert self.get_experiment_by_name(name) is None, "there is one of this name"
        self.calls.append(("experiment", name))

    def create_run(self, experiment, run_name):
        self.calls.append(("run", experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    def log_param(self, run, name, value):
        self.calls.append(("param", run, name, value))

    def log_batch(self, run, metrics):
        self.calls.append(("metrics", run, metrics))

    def set_terminated(self, run):
        self.calls.append(("end", run))


def test_mlflow_resumes_the_run_that_it_began(monkeypatch, about):
    entities = types.SimpleNamespace(Metric=lambda *each: each)
    module(monkeypatch, "mlflow", MlflowClient=Client, entities=entities)
    CLIENTS.clear()
    for _ in range(2):
        made = trackers.opened(["mlflow"], "", about)
        made.write(7, VALUES)
        made.close()
    first, second = (client.calls for client in CLIENTS)
    assert first[:3] == [
        ("experiment", "m3"),
        ("run", "3", "generator:0"),
        ("param", "abc", "steps", "5"),
    ]
    for calls in (first, second):
        kind, run, found = calls[-2]
        assert (kind, run) == ("metrics", "abc")
        assert [(each[0], each[3]) for each in found] == [
            ("loss", 7),
            ("held_out_auc/en", 7),
            ("held_out_auc/zh-TW", 7),
        ]
        assert calls[-1] == ("end", "abc")
    assert len(second) == 2  # nothing is begun


def test_clusters_that_begin_at_once_make_one_experiment(monkeypatch, about, capsys):
    entities = types.SimpleNamespace(Metric=lambda *each: each)
    module(monkeypatch, "mlflow", MlflowClient=Client, entities=entities)
    CLIENTS.clear()
    each = [about._replace(folder=about.workdir / f"cluster-{k}") for k in range(3)]
    with futures.ThreadPoolExecutor() as pool:
        opened = list(pool.map(lambda own: trackers.opened(["mlflow"], "", own), each))
    for made in opened:
        made.write(7, VALUES)
    assert [client.calls[-1][0] for client in CLIENTS] == 3 * ["metrics"]
    assert "takes no more metrics" not in capsys.readouterr().out


def test_mlflow_resumes_a_run_whose_settings_it_did_not_take(monkeypatch, about):
    entities = types.SimpleNamespace(Metric=lambda *each: each)
    module(monkeypatch, "mlflow", MlflowClient=Client, entities=entities)
    CLIENTS.clear()
    refused = mock.Mock(side_effect=OSError("the server is restarting"))
    with monkeypatch.context() as patch:
        patch.setattr(Client, "log_param", refused)
        trackers.opened(["mlflow"], "", about)
    trackers.opened(["mlflow"], "", about).write(7, VALUES)
    assert [call[:2] for call in CLIENTS[1].calls] == [("metrics", "abc")]


def read(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as found:
        return found.read().decode()


def test_prometheus_reads_the_newest_values(about, capsys):
    port = ports.free_port()
    made = trackers.opened([], str(port), about)
    said = capsys.readouterr().err
    assert said == f"generator:0: metrics at http://127.0.0.1:{port}/metrics\n"
    made.write(7, {"loss": 9.0})
    made.write(8, VALUES)
    text = read(port)
    assert 'nebula_step{cluster="generator:0",of=""} 8.0' in text
    assert 'nebula_loss{cluster="generator:0",of=""} 2.5' in text
    assert 'nebula_held_out_auc{cluster="generator:0",of="en"} 0.5' in text
    made.close()
    with pytest.raises(OSError, match="refused"):
        read(port)


def test_clusters_on_one_machine_take_the_ports_that_follow(about, capsys):
    port = ports.free_port()
    with socket.create_server(("127.0.0.1", port)):
        made = trackers.opened([], f"127.0.0.1:{port}", about)
        made.close()
    shown = capsys.readouterr().err
    assert f":{port}/" not in shown
    assert ":" in shown


class Failing:
    """A tracker whose service is away."""

    def write(self, step, values):
        raise ConnectionError("nobody answers")

    def close(self):
        raise AssertionError("it was left out")


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(about, capsys):
    kept = Recorder()
    made = trackers.opened([Failing(), kept], "", about)
    for step in (1, 2):
        made.write(step, VALUES)
    made.close()
    assert [name for name, *_ in kept.calls] == ["write", "write", "close"]
    assert capsys.readouterr().err == (
        "Failing takes no more metrics, and the run goes on: ConnectionError: nobody"
        " answers\n"
    )


def test_a_service_that_lets_nobody_in_is_left_out(monkeypatch, about, capsys):
    def init(**given):
        raise PermissionError("no key")

    module(monkeypatch, "wandb", init=init, Settings=dict)
    made = trackers.opened(["wandb"], "", about)
    made.write(1, VALUES)
    made.close()
    said = "wandb takes no more metrics, and the run goes on: PermissionError: no key\n"
    assert capsys.readouterr().err == said


def test_ones_own_is_named_by_module_and_name(monkeypatch, about):
    told = []
    module(monkeypatch, "mine", Tracker=lambda about: told.append(about) or Recorder())
    trackers.check(["mine:Tracker"], "")
    trackers.opened(["mine:Tracker"], "", about)
    assert told == [about]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wandbb", "tracker=wandbb: there is none of this name; expected"),
        ("no_such:T", "tracker=no_such:T: No module named 'no_such'; expected"),
        ("json:T", "tracker=json:T: module 'json' has no attribute 'T'"),
    ],
)
def test_an_unknown_tracker_is_refused_before_anything_starts(name, words):
    with pytest.raises(errors.SettingsError, match=words):
        trackers.check([name], "")


@pytest.mark.parametrize("port", ["x", "1.2.3.4:", "70000", "²"])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(errors.SettingsError, match=r"metrics_port="):
        trackers.check([], port)


@pytest.mark.parametrize(
    ("name", "port"), [("wandb", ""), ("mlflow", ""), ("trackio", ""), (None, "9400")]
)
def test_a_library_that_is_missing_names_its_extra(monkeypatch, name, port):
    monkeypatch.setitem(sys.modules, name or "prometheus_client", None)
    extra = name or "prometheus"
    with pytest.raises(installed.MissingExtra, match=rf"nebula_jax\[{extra}\]"):
        trackers.check([name] if name else [], port)
