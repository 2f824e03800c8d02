"""A run with a quorum: a cluster is killed, comes anew, and ends with all others."""

import json
import signal
import time

import ports
import psutil
import pytest
import tiny_runs
import trees

NAMES = ["cluster-0", "cluster-1", "cluster-2"]
STEPS = 150


class ByHand:
    """Clusters of one run, each started by its own command."""

    def __init__(self, runs, workdir, **flags):
        self._runs, self.workdir = runs, workdir
        address = f"127.0.0.1:{ports.free_port()}"
        self._flags = flags | {"workdir": workdir, "tls": "off", "restart": 0}
        self._reach = [{"listen": address}, {"peer": address}, {"peer": address}]
        self.processes = [self.start(number) for number in range(3)]

    def start(self, number):
        """Starts a cluster, for the first time or again."""
        more = self._reach[number]
        return self._runs.start(cluster=number, **self._flags, **more)

    def folder(self, number):
        return self._runs.folder / self.workdir / NAMES[number]

    def wait_for(self, number, step=0):
        """Waits until a cluster has saved a step after this one; returns it."""
        deadline = time.monotonic() + 120
        while True:
            newest = tiny_runs.newest(self.folder(number) / "checkpoints")
            if newest > step:
                return newest
            if self.processes[number].poll() is not None:
                raise AssertionError(self.processes[number].communicate()[0])
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self):
        outputs = [each.communicate(timeout=180)[0] for each in self.processes]
        return [each.returncode for each in self.processes], outputs

    def kill_all(self):
        for each in self.processes:
            if each.poll() is None:
                each.kill()


@pytest.fixture
def by_hand(runs):
    started = []

    def start(workdir, **flags):
        runs.finished(cluster="whole", steps=1, clusters=3, workdir="text")
        vocabulary = runs.flag("text", "vocabulary")
        flags |= {"clusters": 3, "hub": 0, "vocabulary": vocabulary}
        started.append(ByHand(runs, workdir, **flags))
        return started[-1]

    yield start
    for each in started:
        each.kill_all()


@pytest.mark.slow
def test_a_killed_cluster_comes_anew_and_all_end_alike(runs, by_hand):
    run = by_hand(
        "quorum",
        **{"quorum": 2, "grace": 1, "steps": STEPS, "checkpoint_every": 10},
        **{"emulate_compute": 100, "reconnect_timeout": 300},
    )
    run.wait_for(2)
    run.processes[2].send_signal(signal.SIGKILL)
    killed = run.processes[2].communicate()[0]
    on = run.wait_for(0, run.wait_for(0))  # the others go on
    # Until it is back, however long that takes on a busy machine, they are too few.
    paused = psutil.Process(run.processes[1].pid)
    paused.suspend()
    run.processes[2] = run.start(2)
    run.wait_for(2, on)
    paused.resume()
    statuses, outputs = run.end()
    assert statuses == [0, 0, 0], (outputs, killed)
    assert "goes on without cluster:2" in outputs[0]
    assert "cluster:2 has rejoined" in outputs[0]
    assert "cluster:2 is sent the state after step" in outputs[0]
    states = [runs.state("quorum", name, STEPS) for name in NAMES]
    for each in states[1:]:
        trees.assert_same(each["state"]["params"], states[0]["state"]["params"])
        trees.assert_same(each["outers"], states[0]["outers"])
        assert each["state"]["step"] == STEPS
    summaries = [
        json.loads((run.folder(number) / "summary.json").read_text())["rounds"]
        for number in range(3)
    ]
    assert summaries[2]["from_state"] == 1
    assert summaries[2]["messages"] > 0  # it was a member again
    assert summaries[0]["without"]["cluster:2"] >= summaries[2]["missed"]
    assert summaries[1]["missed"] == summaries[0]["without"].get("cluster:1", 0)
    for number in range(3):
        assert (run.folder(number) / "encoder").is_dir()
