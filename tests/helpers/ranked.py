"""A small program of several processes: `python ranked.py '{"process_id": 0, ...}'`.

Takes steps in which all processes meet, prints each, and obeys "then" after some.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

import ports

STEP_SECONDS = 0.05


def arrays() -> dict:
    """Arrays of many types, with bits that arithmetic would lose."""
    import ml_dtypes
    import numpy as np

    return {
        "float32": np.array([[1, -0.0], [np.inf, 1e-40]], np.float32),
        "nan": np.array([0x7FC00001], np.uint32).view(np.float32),
        "bfloat16": np.array(-0.0, ml_dtypes.bfloat16),
        "bool": np.array([True, False, True]),
        "uint8": np.array([255, 3], np.uint8),
        "int32": np.array([-1, 2**31 - 1], np.int32),
        "empty": np.zeros((0, 3), np.float32),
    }


def shared() -> dict[str, str]:
    """Shares arrays with the other processes; name -> their bytes as they came."""
    import jax
    import numpy as np

    from nebula_jax.communication import ranks
    from nebula_jax.parallel import mesh as mesh_lib

    like = jax.eval_shape(arrays)
    came = ranks.from_root(arrays() if ranks.is_root() else None, like)
    found = {name: np.asarray(leaf).tobytes().hex() for name, leaf in came.items()}
    rows = np.arange(4, dtype=np.float32)[:, None]
    mesh = mesh_lib.make_mesh(jax.devices())
    here = mesh_lib.rows_here(mesh, 4)
    split = mesh_lib.put_rows(mesh, rows[here], 4)
    assert len(rows[here]) == 4 // ranks.count()
    whole = ranks.to_root({"rows": split})
    found["rows"] = whole["rows"].tobytes().hex() if ranks.is_root() else ""
    found |= crossed()
    found["bytes"] = ranks.bytes_from_root(b"of the root" * ranks.is_root()).hex()
    return found


def crossed() -> dict[str, str]:
    """Sends and receives on a channel of the root's; name -> what came, as bytes."""
    import jax
    import numpy as np

    from nebula_jax import trace
    from nebula_jax.communication import channels, codecs, loopback, ranks, worker_link
    from nebula_jax.communication.wire import frames

    checked = []
    spec = jax.ShapeDtypeStruct((4,), np.int32)
    carrier = loopback.Loopback()
    if not ranks.is_root():
        peer = frames.Hello("d", "1", {})
        carrier = worker_link.WorkerLink(peer, trace.OFF)
    codec = codecs.identity()
    sender = carrier.sender("x", spec, codec)
    receiver = carrier.receiver("x", spec, codec, check=checked.append)
    assert isinstance(receiver, channels.Receiver)
    has_arrived = [receiver.has_arrived]
    for number in range(3):
        sender.send(7, np.arange(4, dtype=np.int32) + number, number)
    has_arrived.append(receiver.has_arrived)
    came = np.stack([np.asarray(each) for each in receiver.recv_all(7, 3)])
    if ranks.is_root():  # which alone checks, before the others have anything
        np.testing.assert_array_equal(came, np.stack(checked))
    else:
        assert not checked
    return {"has_arrived": str(has_arrived), "came": came.tobytes().hex()}


def main() -> int:
    given = json.loads(sys.argv[1])
    from nebula_jax.communication import ranks
    from nebula_jax.communication.wire import activity
    from nebula_jax.runtime.life import process
    from nebula_jax.runtime.ranks import cluster

    steps, then = given.pop("steps", 10), given.pop("then", "").split()
    stuck_timeout = given.pop("stuck_timeout", 60.0)
    described = {"--seed": 0}

    def train() -> int:
        interrupt = process.Interrupt().install()
        work = activity.Work(stuck_timeout)
        cluster.watch(work, interrupt)
        cluster.on_end(lambda reason: print(f"aborted: {reason}", flush=True))
        work.begin()
        if "share" in then:
            print(json.dumps(shared()), flush=True)
        if "await" in then:
            print("step 0", flush=True)
            time.sleep(3600 if ranks.is_root() else 0)  # the root waits for a peer
            ranks.agree(0)
        interrupt.is_graceful = True

        def numbers():
            for step in range(1, steps + 1):
                if interrupt.requested():
                    return
                yield step

        step = 0
        for step in ranks.in_step(numbers()):
            total = ranks.exchange([step]).sum()
            assert total == step * ranks.count()
            print(f"step {step}", flush=True)
            work.step_done()
            time.sleep(STEP_SECONDS)
            if "fail" in then and step == 3:
                raise OSError("the disk is full")
            while "lose" in then and step == 3 and ranks.is_root():
                interrupt.end_wait("toy", "a peer")  # as a link that is lost
                time.sleep(STEP_SECONDS)
            if "hang" in then and step == 3:
                time.sleep(3600)
        return interrupt.exit_status("toy", step, steps)

    given["workdir"] = pathlib.Path(given["workdir"])
    settings = cluster.Settings(**given)
    return process.guarded(lambda: cluster.run(settings, described, train))


class Started:
    """The processes of a cluster, each with files for what it prints."""

    def __init__(self, folder: pathlib.Path, *each: dict, **common) -> None:
        """Starts a process for each of `each`: what it is given besides `common`."""
        common = {
            "coordinator": f"127.0.0.1:{ports.free_port()}",
            "num_processes": len(each),
            "connect_timeout": 30.0,
            "peer_timeout": 10.0,
            "workdir": str(folder),
        } | common
        self.processes, self._files = [], []
        import tiny_runs  # not in the processes, which need no checkpoints

        environment = os.environ | {"PYTHONPATH": tiny_runs.QUICK_PATH, "XLA_FLAGS": ""}
        for number, own in enumerate(each):
            given = common | {"process_id": number} | own
            files = [folder / f"{number}.{kind}" for kind in ("out", "err")]
            self._files.append(files)
            with files[0].open("w") as out, files[1].open("w") as err:
                command = [sys.executable, __file__, json.dumps(given)]
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=err)
                )

    def printed(self, number: int) -> list[str]:
        """Returns the lines of a process so far."""
        return self._files[number][0].read_text().splitlines()

    def message(self, number: int) -> str:
        """Returns the last message of a process."""
        return (self.errors(number) or [""])[-1]

    def errors(self, number: int) -> list[str]:
        """Returns the lines of a process on standard error so far."""
        return self._files[number][1].read_text().splitlines()

    def wait_for_step(self, step: int) -> None:
        """Waits until every process has taken a step."""
        deadline = time.monotonic() + 60
        for number, each in enumerate(self.processes):
            while f"step {step}" not in self.printed(number):
                assert time.monotonic() < deadline
                assert each.poll() is None, self.message(number)
                time.sleep(0.02)

    def ends(self, timeout: float = 60) -> list[int]:
        """Waits for all; returns their exit statuses. None is left behind."""
        try:
            return [each.wait(timeout) for each in self.processes]
        finally:
            for each in self.processes:
                each.kill()
                each.wait()


if __name__ == "__main__":
    sys.exit(main())
