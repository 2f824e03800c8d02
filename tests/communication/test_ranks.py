import json

import jax
import numpy as np
import pytest
import ranked

from nebula_jax import trace
from nebula_jax.communication import ranks, worker_link
from nebula_jax.communication.wire import frames
from nebula_jax.runtime.life import process

ROWS = np.arange(4, dtype=np.float32)[:, None]


def test_no_bit_changes_on_the_way_and_one_that_fails_ends_all_with_its_words(tmp_path):
    share, fail = {"then": "share"}, {"then": "share fail"}
    started = ranked.Started(tmp_path, share, fail, steps=10_000)
    assert started.ends() == [process.ENDED_BY_PEER, 1]
    assert started.message(1) == "error: the disk is full"
    assert started.message(0) == "error: process 1 failed: the disk is full"
    wanted = {name: leaf.tobytes().hex() for name, leaf in ranked.arrays().items()}
    wanted["bytes"] = b"of the root".hex()
    wanted["has_arrived"] = "[False, True]"  # also where there is no line
    numbers = np.arange(4, dtype=np.int32) + np.arange(3, dtype=np.int32)[:, None]
    wanted["came"] = numbers.tobytes().hex()
    for number, rows in enumerate((ROWS.tobytes().hex(), "")):
        found = json.loads(started.printed(number)[0])
        assert found == wanted | {"rows": rows}


def test_in_a_cluster_of_one_process_nothing_is_done():
    arrays = ranked.arrays()
    assert ranks.count() == 1
    assert ranks.is_root()
    assert ranks.from_root(arrays, jax.eval_shape(ranked.arrays)) is arrays
    assert ranks.everywhere(arrays) is arrays
    assert ranks.bytes_from_root(b"x") == b"x"
    assert ranks.agree(7) == 7
    assert ranks.exchange([1, -(2**62)]).tolist() == [[1, -(2**62)]]
    assert list(ranks.in_step(iter([3, 4]))) == [3, 4]
    rows = jax.device_put(ROWS)
    np.testing.assert_array_equal(ranks.to_root({"a": rows})["a"], ROWS)


def test_the_roots_peer_is_every_processs():
    peer = frames.Hello("d", "1", {"--steps": 9}, (4, 8), {"model": {"layers": 2}})
    assert worker_link.share_peer(peer) == peer


def test_a_link_without_a_line_waits_for_nothing_and_carries_nothing():
    with worker_link.WorkerLink(frames.Hello("d", "1", {}), trace.OFF) as link:
        link.welcome(3)
        link.wait_for_step(9)
        link.step_done(1)
        link.stop(2)
        assert link.wait_for_welcome(1.0) == 0
        assert (link.stop_step, link.waited) == (None, 0.0)
        assert link.bytes_moved("sent") == 0
        assert link.arrived(0) is None
        for call in (link.put_tensor, lambda message: link.take_tensor(0, "x")):
            with pytest.raises(AssertionError):
                call(None)
