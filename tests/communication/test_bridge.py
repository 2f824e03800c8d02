import datetime
import random
import re
import socket
import time
import types

import jax
import jax.numpy as jnp
import links
import numpy as np
import ports
import pytest
import trees
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication import bridge, codec, codecs, endpoints, wan
from nebula_jax.communication.wire import frames, receive_queue, session, windows
from nebula_jax.security import private_files, tls
from nebula_jax.security.tls import certificates, credentials

SPEC = {
    "ids": jax.ShapeDtypeStruct((4, 33), jnp.int32),
    "hidden": jax.ShapeDtypeStruct((4, 1000), jnp.float32),
    "bfloat16": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
    "float8": jax.ShapeDtypeStruct((7,), jnp.float8_e4m3fn),
    "empty": jax.ShapeDtypeStruct((0, 3), jnp.float32),
    "scalar": jax.ShapeDtypeStruct((), jnp.int32),
    "bool": jax.ShapeDtypeStruct((2, 3), jnp.bool_),
}
SETTINGS = {"--steps": 5, "vocabulary": "abc"}


def hello(cluster, settings=SETTINGS, version="0.1"):
    return links.hello(cluster, settings, version)


OURS = hello("discriminator")


@pytest.fixture
def linked(stack):
    """Makes a listener's and a connector's link."""

    def linked(server=None, client=None, **settings):
        pair = links.Pair(stack, server, client, **settings)
        return pair.here, pair.there

    return linked


def arrays(seed):
    random = np.random.RandomState(seed)
    drawn = {name: np.asarray(random.randn(*spec.shape)) for name, spec in SPEC.items()}
    return {name: (10 * drawn[name]).astype(SPEC[name].dtype) for name in SPEC}


def assert_crossed(received, seed):
    trees.assert_same(received, arrays(seed))
    assert {name: leaf.dtype for name, leaf in received.items()} == {
        name: spec.dtype for name, spec in SPEC.items()
    }


@pytest.mark.parametrize(
    ("encrypted", "wan_flag"),
    [(False, ""), (True, "100mbit,5ms")],
    ids=["plain", "tls"],
)
def test_tensors_and_tokens_cross_unchanged_both_ways(
    tmp_path, pool, encrypted, wan_flag, linked
):
    server, client = links.credentials(tmp_path, encrypted)
    lines = wan.from_string(wan_flag)
    here, there = linked(server | {"line": lines.down}, client | {"line": lines.up})
    outgoing, incoming = links.channel(there, here, "tokens", SPEC)
    reply, back = links.channel(here, there, "grads", SPEC)

    def connector():
        with there:
            assert there.wait_for_welcome(5.0) == 7
            for step in range(8, 14):
                outgoing.send(step, arrays(step))
                there.wait_for_step(step - 2)
                assert_crossed(back.recv(step), step)

    far = pool.submit(connector)
    with here:
        here.welcome(7)
        for step in range(8, 14):
            received = incoming.recv(step)
            assert_crossed(received, step)
            reply.send(step, received)
            here.step_done(step)
    far.result(10)
    if encrypted:
        assert here.owner == "generator-0"
    assert here.ledger["received tokens"] == there.ledger["sent tokens"]
    assert here.ledger["received tokens"][0] == 6


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_send_blocks_while_nobody_reads_and_loses_nothing(
    tmp_path, pool, encrypted, linked, monkeypatch
):
    """Tensors larger than every buffer."""
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1 << 20)
    here, there = linked(*links.credentials(tmp_path, encrypted))
    big = np.arange(1_000_000, dtype=np.float32)
    outgoing, incoming = links.channel(there, here, "h", jax.typeof(big))
    links.begin(here, there)
    sent = []  # and the one that is being sent
    made = (sent.append(step) or big + step for step in range(14))
    with here:
        done = pool.submit(send_all, there, outgoing, made)
        wait_until(lambda: sent)
        time.sleep(1.0)
        # The reader's inbox, and what the window lets out beyond it.
        assert len(sent) - 1 <= receive_queue.MAX_TENSORS + windows.WINDOW_TENSORS
        for step in range(14):
            np.testing.assert_array_equal(incoming.recv(step), big + step)
    done.result(10)
    assert len(sent) == 14


def test_a_connector_may_receive_from_the_first_moment(linked):
    here, there = linked()
    outgoing = here.sender("grads", SPEC, codec.identity())
    here.welcome(0)
    outgoing.send(1, arrays(1))
    time.sleep(0.3)  # the tensor is on the socket before the receiver is planned
    incoming = there.receiver("grads", SPEC, codec.identity())
    there.wait_for_welcome(5.0)
    assert_crossed(incoming.recv(1), 1)


ATTEMPTS = {
    "send": lambda link, sender, receiver: sender.send(1, arrays(1)),
    "receive": lambda link, sender, receiver: receiver.recv(1),
    "step_done": lambda link, sender, receiver: link.step_done(1),
    "wait_for_step": lambda link, sender, receiver: link.wait_for_step(1),
    "close": lambda link, sender, receiver: link.close(),
}


def early(link):
    """The first thing that a side does, before its Welcome; by its name."""
    sender = link.sender("out", SPEC, codec.identity())
    receiver = link.receiver("back", SPEC, codec.identity())
    return lambda does: ATTEMPTS[does](link, sender, receiver)


@pytest.mark.parametrize("does", ["send", "receive", "step_done", "close"])
def test_a_listener_that_forgets_its_welcome_is_told(pool, linked, does):
    """Both sides end with the reason, and nobody waits for the other."""
    here, there = linked()
    attempt = early(here)
    waiting = pool.submit(there.wait_for_welcome, 10.0)
    words = r"call link.welcome\(step\) first"
    with pytest.raises(session.LocalProtocolError, match=words), here:
        attempt(does)
    with pytest.raises(session.PeerAborted, match=words):
        waiting.result(5)


@pytest.mark.parametrize(
    ("does", "is_welcome_there"),
    [("send", False), ("receive", True), ("wait_for_step", True)],
)
def test_a_connector_that_does_not_wait_for_its_welcome_is_told(
    linked, does, is_welcome_there
):
    """Also if it has come by chance: nothing behind it would be read."""
    here, there = linked()
    attempt = early(there)
    if is_welcome_there:
        here.welcome(0)
        wait_until(lambda: there._session.is_paused)
    words = r"call link.wait_for_welcome\(timeout\) first"
    with pytest.raises(session.LocalProtocolError, match=words), there:
        attempt(does)
    here.abort("done")


def test_a_peer_that_ends_too_early_is_an_error_not_a_wait(pool, linked):
    here, there = linked()
    _, incoming = links.channel(there, here, "tokens", SPEC)
    links.begin(here, there)
    ending = pool.submit(there.close)
    words = "generator:0 sent End while more was due"
    with pytest.raises(session.RemoteProtocolError, match=words), here:
        incoming.recv(1)
    with pytest.raises(session.PeerAborted, match=words):
        ending.result(5)


def test_closing_with_unread_tensors_ends(pool, linked):
    here, there = linked()
    outgoing, _ = links.channel(there, here, "tokens", SPEC)
    links.begin(here, there)

    sending = pool.submit(send_all, there, outgoing, map(arrays, range(12)))
    time.sleep(0.3)
    here.close()
    sending.result(5)


def test_a_flood_on_a_channel_nobody_waits_for_is_an_error(pool, linked, monkeypatch):
    monkeypatch.setattr(receive_queue, "FLOOD_BYTES", 100_000)
    here, there = linked()
    small = jax.ShapeDtypeStruct((2,), jnp.int32)
    outgoing, _ = links.channel(there, here, "flood", small)
    _, incoming = links.channel(there, here, "due", small)
    links.begin(here, there)

    def flood():
        for step in range(10_000):
            outgoing.send(step, np.zeros(2, np.int32))

    flooding = pool.submit(flood)
    with pytest.raises(session.RemoteProtocolError, match="nobody waits for"), here:
        incoming.recv(0)
    with pytest.raises(session.PeerAborted, match="nobody waits for"):
        flooding.result(10)


@pytest.mark.parametrize("end", ["here", "there"])
def test_a_link_that_has_ended_on_one_side_does_not_spin(pool, end, linked):
    here, there = linked(peer_timeout=0.4, reconnect_timeout=20.0)
    links.begin(here, there)
    first, second = (here, there) if end == "here" else (there, here)
    closing = pool.submit(first.close)
    time.sleep(0.6)  # past the time of pings and of silence
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.3
    second.close()
    closing.result(5)


def test_a_tensor_with_another_tag_is_an_error_not_a_guess(pool, linked):
    here, there = linked()
    pack = codecs.pack_ids(100)
    spec = jax.ShapeDtypeStruct((8,), jnp.int32)
    outgoing, incoming = links.channel(there, here, "tokens", spec, pack)
    links.begin(here, there)
    outgoing.send(41, np.arange(8, dtype=np.int32), micro_batch=3)
    words = "generator:0 sent tokens for step 41, micro-batch 3; expected step 41, mic"
    with pytest.raises(session.RemoteProtocolError, match=words), here:
        incoming.recv(41, micro_batch=2)
    with pytest.raises(session.PeerAborted, match=f"discriminator gave up: {words}"):
        there.wait_for_step(41)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"settings": SETTINGS | {"--steps": 6}}, "has --steps=6, {} has --steps=5"),
        ({"settings": {"--steps": 5}}, "has vocabulary=None, {} has vocabulary=abc"),
        ({"version": "0.2"}, "runs nebula_jax 0.2, {} 0.1"),
    ],
)
def test_clusters_that_disagree_part_in_words(pool, theirs, words):
    theirs, words = hello("generator:0", **theirs), words.format("discriminator")
    with links.listening(OURS) as listening:
        coming = pool.submit(links.dial, listening.address, theirs)
        with pytest.raises(bridge.Mismatch, match=f"generator:0 {words}"):
            listening.accept(5.0)
        with pytest.raises(errors.NebulaError, match=r"discriminator (has|runs|gave)"):
            coming.result(5)


EVIL = "\x1b[2J\nall is well\u202e\u200f" + 60_000 * "x"


def is_fit(text):
    """One line that does nothing to a terminal, and that a person can read."""
    return text.isprintable() and len(text) < 600


@pytest.mark.parametrize(
    "strange",
    [
        hello("generator:0", version=EVIL),
        hello("generator:0", SETTINGS | {EVIL: 1}),
        hello("generator:0", SETTINGS | {"vocabulary": {"deep": [EVIL]}}),
    ],
    ids=["version", "name", "nested"],
)
def test_nothing_that_a_peer_sends_reaches_a_terminal_as_it_is(pool, strange):
    lines = []
    with links.listening(OURS, log=lines.append) as listening:
        coming = pool.submit(links.dial, listening.address, strange, log=lines.append)
        with pytest.raises(bridge.Mismatch) as here:
            listening.accept(5.0)
        with pytest.raises(errors.NebulaError) as there:
            coming.result(5)
    for text in (str(here.value), str(there.value), *lines):
        assert is_fit(text)


def test_the_reason_of_an_abort_is_fit_to_be_printed(linked):
    here, there = linked()
    here.abort(EVIL)
    with pytest.raises(session.PeerAborted, match="gave up") as caught:
        there.wait_for_welcome(5.0)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < frames.MAX_REASON_BYTES / 2


def send_all(link, sender, payloads):
    """A side that sends these, and is done."""
    with link:
        for step, payload in enumerate(payloads):
            sender.send(step, payload)


def refuse(words, seconds):
    def check(peer):
        time.sleep(seconds)
        raise bridge.Mismatch(f"{words} {peer.cluster}")

    return check


@pytest.mark.parametrize("late", ["connector", "listener"])
def test_what_callers_compare_is_told_by_both_however_soon_one_leaves(pool, late):
    here = refuse("nothing like", 0.5 * (late == "listener"))
    there = refuse("unlike", 0.5 * (late == "connector"))
    with links.listening(check=here) as listening:
        coming = pool.submit(links.dial, listening.address, check=there)
        with pytest.raises(bridge.Mismatch, match="nothing like generator:0"):
            listening.accept(5.0)
        with pytest.raises(bridge.Mismatch, match="unlike discriminator"):
            coming.result(5)


needs_ipv6 = pytest.mark.skipif(not ports.has_ipv6(), reason="this host has no IPv6")


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_a_listener_at_all_addresses_takes_ipv6_and_ipv4(pool, host):
    with links.listening(address=("::", 0)) as listening:
        coming = pool.submit(links.dial, (host, listening.address[1]))
        here, there = listening.accept(5.0), coming.result(5)
        here.abort("done")
        there.abort("done")


@pytest.mark.parametrize(
    ("host", "written"),
    [("127.0.0.1", "127.0.0.1"), pytest.param("::1", "[::1]", marks=needs_ipv6)],
)
def test_a_port_in_use_and_one_where_nobody_answers_are_named(host, written):
    with endpoints.listen((host, 0)) as taken:
        port = taken.getsockname()[1]
        address = re.escape(f"{written}:{port}")
        with pytest.raises(endpoints.CannotListen, match=f"on {address}: .*in use"):
            endpoints.listen((host, port))
    start = time.monotonic()
    with pytest.raises(bridge.ConnectError, match=f"nobody answers at {address}"):
        links.dial((host, port), connect_timeout=0.3)
    assert time.monotonic() - start < 10


def refused(listening, pool, client, name, words):
    """A peer is refused with a reason, and another one still gets in."""
    coming = pool.submit(links.dial, listening.address, name, **client)
    with pytest.raises(session.PeerAborted, match=re.escape(words)):
        coming.result(5)
    with pytest.raises(bridge.ConnectError, match="nobody came"):
        listening.accept(0.1)


def test_a_peer_that_is_long_in_coming_is_asked_for_less_and_less_often(monkeypatch):
    """Through a switch each attempt is a request; who comes is found within 2 s."""
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(bridge, "time", clock)
    tries = []

    def attempt(deadline):
        tries.append(clock.now)
        raise ConnectionError("it is at no lab at present")

    given = attempt, ("d", "a switch"), 600.0, print, random.Random(b"seed")
    with pytest.raises(bridge.NobodyThere, match="after 600 s"):
        bridge._rendezvous(*given)
    gaps = np.diff(tries)
    assert max(gaps) <= 2.0
    assert max(gaps[:10]) <= 0.2
    assert len(tries) < 600
    assert tries[-1] > 599.0


def test_a_cluster_may_only_speak_under_its_certificates_name(tmp_path, pool):
    server, client = links.credentials(tmp_path, True)
    words = "generator:1 shows a certificate for generator-0"
    said = []
    with links.listening(log=said.append, **server) as listening:
        refused(listening, pool, client, "generator:1", words)
        coming = pool.submit(links.dial, listening.address, **client)
        listening.accept(5.0).abort("done")
        coming.result(5.0).abort("done")
    assert said == [f"refused a connection from 127.0.0.1: {words}"]


def test_a_listener_too_may_only_speak_under_its_certificates_name(tmp_path):
    server, client = links.credentials(tmp_path, True)
    words = "generator:1 shows a certificate for discriminator"
    with (
        links.listening("generator:1", **server) as listening,
        pytest.raises(bridge.Mismatch, match=words),
    ):
        links.dial(listening.address, **client)


def test_a_certificate_without_a_name_speaks_for_nobody(tmp_path, pool):
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    signer = certificates.authority(now - day, now + day)
    names = {
        "discriminator": x509.DNSName("discriminator"),
        "person": x509.RFC822Name("someone@example.org"),
    }
    for folder, name in names.items():
        (tmp_path / folder).mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        made = certificates.leaf(signer, key.public_key(), name, now - day, now + day)
        pem = certificates.pem(key, made, signer.certificate).decode()
        private_files.write(tmp_path / folder / credentials.FILE, pem)
    client = {"tls": tls.client_contexts(tmp_path / "person")}
    server = tls.server_contexts(tmp_path / "discriminator")
    with links.listening(tls=server) as listening:
        refused(listening, pool, client, "generator:0", "for nobody's DNS name")


@pytest.mark.parametrize("on", ["listener", "connector"])
def test_tls_on_one_side_alone_is_said_on_both(tmp_path, on):
    server, client = links.credentials(tmp_path, encrypted=True)
    said = []
    if on == "listener":
        client, words = {}, "refused this cluster: it sent a frame without TLS: that is"
        told = "it sent a frame without TLS: that is on here, and off there (tls)"
    else:
        server, words = {}, "closed the connection in the handshake .* is tls off there"
        told = "begins TLS: it is on there, and off here (tls)"
    with links.listening(OURS, log=said.append, **server) as listening:
        kinds = session.PeerAborted, bridge.NobodyThere
        with pytest.raises(kinds, match=words):
            links.dial(listening.address, connect_timeout=0.5, **client)
    assert any(told in line for line in said)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_who_is_not_expected_is_refused_without_a_hello(tmp_path, encrypted):
    server, client = links.credentials(tmp_path, encrypted)
    received = b""
    with links.listening(OURS, clusters=["generator:1"], **server) as listening:
        raw = socket.create_connection(listening.address, 5.0)
        if encrypted:
            raw = client["tls"]().wrap_socket(raw, server_hostname="discriminator")
        raw.sendall(frames.encode(frames.Open(bytes(16), 1), 0, 0)[0])
        raw.sendall(frames.encode(hello("generator:0"), 0, 0)[0])
        while data := raw.recv(1 << 16):
            received += data
        raw.close()
    words = b"generator-0" if encrypted else b"generator:0 was not expected"
    assert words in received
    assert b"settings" not in received


def came_and_was_killed(listening, pool, begin=lambda *links: None, **client):
    """Both links of a cluster whose process has died, and does not come back."""
    coming = pool.submit(links.dial, listening.address, **client)
    here, killed = listening.accept(5.0), coming.result(5.0)
    begin(here, killed)
    killed._driver._dial = lambda by: time.sleep(60)
    killed._driver.connection.io.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: here.is_away)
    return here, killed


def test_a_cluster_may_be_started_anew_before_the_run_has_begun(pool):
    with links.listening(reconnect_timeout=30.0) as listening:
        first, killed = came_and_was_killed(listening, pool)
        coming = pool.submit(links.dial, listening.address)
        second, there = listening.accept(5.0), coming.result(5.0)
        assert first.is_over
        second.welcome(3)
        assert there.wait_for_welcome(5.0) == 3
        second.abort("done")
        there.abort("done")
        killed.abort("done")


def test_a_run_whose_cluster_was_started_anew_ends_soon_so_that_all_start_again(
    tmp_path, pool
):
    """By a certificate alone: else anybody could end a run whose line breaks."""
    server, client = links.credentials(tmp_path, encrypted=True)
    with links.listening(reconnect_timeout=30.0, **server) as listening:
        here, killed = came_and_was_killed(listening, pool, links.begin, **client)
        again = session.START_AGAIN + " (generator:0 has saved none)"
        words = f"the session that generator:0 had is over now: {again}"
        refused(listening, pool, client, "generator:0", words)
        words = f"generator:0 was started anew, so its session cannot go on: {again}"
        with pytest.raises(session.PeerGone, match=re.escape(words)):
            here.wait_for_step(4)
        killed.abort("done")
