"""The authority as a process of its own: what it answers, and to whom."""

import asyncio
import sys

import pytest
import two_labs

from nebula_jax.federation import issuer
from nebula_jax.security.membership import member, site_folder


@pytest.fixture
def folder(tmp_path):
    return two_labs.found(tmp_path / "s")


def process(folder):
    command = [sys.executable, "-m", "scripts.nebula", "authority"]
    return issuer.Process([*command, f"--federation={folder.path}"])


def test_it_certifies_and_refuses_with_the_reason(folder):
    async def ask():
        made = process(folder)
        renewal = member.renewal_request(folder, "switch")[1]
        found = await made.ask({"op": "renew", **renewal.fields()})
        assert (found["lab"], set(found["issued"])) == ("lab-s", {"switch"})
        with pytest.raises(site_folder.Refusal, match="not signed") as error:
            await made.ask({"op": "renew", **renewal._replace(proof=b"").fields()})
        assert error.value.reason == "bad_signature"
        await made.close()

    asyncio.run(ask())


def test_who_gives_up_leaves_no_answer_for_the_next(folder):
    async def ask():
        made = process(folder)
        for _ in range(3):
            asked = asyncio.create_task(made.ask({"op": "authority"}))
            await asyncio.sleep(0)
            asked.cancel()
        found = await made.ask({"op": "list"})
        assert set(found) == {"revocations"}
        await made.close()

    asyncio.run(ask())


def test_one_that_ends_is_started_again(folder):
    async def ask():
        made = process(folder)
        await made.ask({"op": "list"})
        made._running.kill()
        made._running.wait()
        assert (await made.ask({"op": "list"}))["revocations"]
        await made.close()

    asyncio.run(ask())


def test_a_command_that_does_not_run_is_named(folder):
    async def ask():
        made = issuer.Process([sys.executable, "-c", "pass"])
        with pytest.raises(site_folder.FederationError, match=r"has ended: .*-c pass"):
            await made.ask({"op": "list"})

    asyncio.run(ask())
