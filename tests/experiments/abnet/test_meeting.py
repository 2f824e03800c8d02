"""The meeting of pairs, each cluster in a thread, over real sockets."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import pytest
import tiny_translations

from experiments.abnet import hello, meeting, pairs
from nebula_jax import errors
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import activity
from nebula_jax.models import transformer
from nebula_jax.training import checkpoint

SHAPE = transformer.Config(60, 2, 16, 2, 32, 16)
SECONDS = 20.0  # until a cluster that does not come is given up


def meet_all(replicas, steps, order=None, texts=None):
    """Lets all clusters meet; cluster -> the step that it goes on after, or an error.

    Args:
      replicas: R.
      steps: cluster -> steps that it has saved.
      order: in which they start.
      texts: cluster -> its text's fingerprint, where it is no `t`.
    """
    flags = tiny_translations.TINY | {"replicas": replicas, "workdir": "w"}
    flags |= {"tls": "off", "connect_timeout": SECONDS, "checkpoint_every": 10}
    agreed = tiny_translations.run(**flags).agreed
    names = pairs.clusters(agreed)
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names
        ]
        where = {
            name: endpoints.written(each.getsockname())
            for name, each in zip(names, ports, strict=True)
        }
    dials, results = meeting.dials(agreed), {}

    runs = {
        name: tiny_translations.run(
            **flags,
            cluster=name,
            listen=where[name],
            peer=",".join(where[each] for each in dials[name]),
        )
        for name in names
    }

    def work(name):
        run = runs[name]
        meeting.check_place(run, run.local.connection())
        text = (texts or {}).get(name, "t")
        greeting = hello.hello(run, steps.get(name, []), SHAPE, {}, {"text": text})
        with meeting.meet(run, greeting, lambda peer: None, activity.Work()) as met:
            assert met.link.peer.cluster == pairs.other_half(name)
            assert list(met.side) == [
                each
                for each in pairs.names(agreed, pairs.role_of(name))
                if each != name
            ]
            return met.start()

    def start(name):
        future = results[name] = concurrent.futures.Future()

        def run():
            try:
                future.set_result(work(name))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    for name in order or names:
        start(name)
        time.sleep(0.02)
    found = {}
    for name, future in results.items():
        try:
            found[name] = future.result(3 * SECONDS)  # it gives up before
        except errors.NebulaError as error:
            found[name] = error
    return found


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_all_go_on_after_the_newest_step_that_all_have(replicas, is_reversed):
    """A cluster that lacks a step is not of the pair of the one that decides."""
    agreed = tiny_translations.run(replicas=replicas, workdir="w").agreed
    names = pairs.clusters(agreed)
    steps = {name: [10, 20, 30, 40] for name in names}
    steps[names[-1]] = [10, 20, 40]  # the last source
    steps[names[0]] = [10, 20, 30]
    order = names[::-1] if is_reversed else names
    found = meet_all(replicas, steps, order)
    assert found == dict.fromkeys(order, 20)


def test_a_source_that_lost_its_files_ends_all_and_is_named():
    names = pairs.clusters(tiny_translations.run(replicas=2, workdir="w").agreed)
    steps = {name: [1000, 1010] for name in names} | {"source:1": []}
    found = meet_all(2, steps)
    assert isinstance(found["target:1"], checkpoint.CheckpointError)
    words = "source:1 has none; target:1 has 1000, 1010"
    assert words in str(found["target:1"])
    for error in found.values():
        assert isinstance(error, errors.NebulaError)
        # One that has not met target:1 by then only finds that it does not come.
        assert words in str(error) or "did not come within" in str(error)


def test_another_text_on_one_side_ends_all():
    found = meet_all(2, {}, texts={"source:1": "another"})
    assert all(isinstance(each, errors.NebulaError) for each in found.values()), found
    words = "need the same model and text"
    assert any(words in str(found[name]) for name in ("source:0", "source:1"))
