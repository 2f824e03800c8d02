"""A real listener, to which clusters come anew, or under names of others."""

import concurrent.futures

import links
import pytest
from two_labs import wait_until

from nebula_jax.communication.wire import session
from nebula_jax.security import tls
from nebula_jax.security.tls import certificates

SETTINGS = {"peer_timeout": 10.0, "reconnect_timeout": 20.0}


def hello(cluster, steps=9):
    return links.hello(cluster, {"--steps": steps})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("credentials")
    certificates.issue_for_run(folder, ["hub", "spoke:0", "spoke:1"])
    return folder


class Spoke(links.Pair):
    """A listener, and a spoke that has come over a line that can break."""

    def __init__(self, stack, folder=None, may_return=True):
        self._folder, self._pool = folder, concurrent.futures.ThreadPoolExecutor(2)
        stack.callback(self._pool.shutdown)
        server = {
            "ours": hello("hub"),
            "clusters": ["spoke:0", "spoke:1"],
            "may_return": may_return,
            "tls": folder and tls.server_contexts(folder / "hub"),
        }
        super().__init__(stack, server, self._client(), breaks=True, **SETTINGS)

    def _client(self, name="spoke:0", certificate="spoke-0", **more):
        contexts = self._folder and tls.client_contexts(self._folder / certificate)
        return {"theirs": hello(name, **more), "peer": "hub", "tls": contexts}

    def dial(self, **more):
        """A future link of a spoke."""
        client = SETTINGS | self._client(**more)
        return self._pool.submit(links.dial, self.listener.address, **client)

    def waits(self):
        """A future end of a wait for the spoke."""
        return self._pool.submit(self.here.wait_for_welcome, 30.0)

    def break_line(self):
        self.proxy.go_down()
        wait_until(lambda: self.here.is_away)


@pytest.mark.parametrize(
    ("is_away", "has_begun", "encrypted"),
    [(False, False, True), (False, True, False), (True, False, False), (True,) * 3],
)
def test_who_may_return_takes_the_place_of_its_former_self(
    stack, folder, is_away, has_begun, encrypted
):
    spoke = Spoke(stack, folder if encrypted else None)
    if has_begun:
        spoke.here.welcome(0)
    if is_away:
        spoke.break_line()
    waiting = spoke.waits()
    coming = spoke.dial()
    came = spoke.listener.accept(5.0)
    assert came.peer.cluster == "spoke:0"
    assert spoke.here.was_lost
    with pytest.raises(session.PeerGone, match="spoke:0 was started anew"):
        waiting.result(20.0)
    came.welcome(3)
    assert coming.result(5.0).wait_for_welcome(5.0) == 3
    came.abort("done")


@pytest.mark.parametrize(
    ("is_away", "words"),
    [(False, "spoke:0 is here already"), (True, "spoke:0 is expected back, not anew")],
)
def test_unless_it_may_a_plain_name_takes_nobodys_place(stack, is_away, words):
    spoke = Spoke(stack, may_return=False)
    spoke.here.welcome(0)
    if is_away:
        spoke.break_line()
    with pytest.raises(session.PeerAborted, match=words):
        spoke.dial().result(5.0)
    assert not spoke.here.is_over
    spoke.proxy.refuse(False)
    spoke.here.step_done(1)
    spoke.there.wait_for_welcome(5.0)
    spoke.there.wait_for_step(1)


def test_other_settings_take_nobodys_place(stack):
    spoke = Spoke(stack)
    spoke.here.welcome(0)
    words = "refused this cluster: spoke:0 has --steps=5, hub has --steps=9"
    with pytest.raises(session.PeerAborted, match=words):
        spoke.dial(steps=5).result(5.0)
    assert not spoke.here.is_over
