"""What a trainer asks of each peer, before anything is sealed with it."""

import contextlib
import datetime
import resource

import pytest
import two_labs
from cryptography.hazmat.primitives import serialization

from nebula_jax import errors
from nebula_jax.federation import switch_client, trainer_keys
from nebula_jax.security import incarnations, policy, seal
from nebula_jax.security.membership import authority, member, revocation
from nebula_jax.security.tls import between_labs

OTHER_LABS = '{"jobs": {"m3": {"labs": {"generator:0": ["lab-u"]}}}}'


SHOWN = [incarnations.shown(number) for number in range(6)]


def certificate(lab, role):
    found = member.own_certificate(lab.folder, role)
    return found.public_bytes(serialization.Encoding.DER)


def offer(incarnation=5, job="m3"):
    return seal.offer(SHOWN[incarnation], "generator:0", job)


def test_a_peer_is_admitted_by_certificate_role_job_lab_policy_and_number(
    labs, monkeypatch
):
    folder, der = labs.s.folder, certificate(labs.t, "trainer")
    rules = folder.path / policy.FILE

    def refused(words, offered, shown=der, lab="lab-t"):
        trainer._lab = lab
        with pytest.raises(errors.NebulaError, match=words):
            trainer._admit(offered, shown)

    with contextlib.closing(
        switch_client.Trainer(folder, "m3", "discriminator", "lab-t")
    ) as trainer:
        assert resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)  # it has a key
        trainer._admit(offer(), der)
        refused("takes part in job bert", offer(job="bert"))
        refused("lab-t \\(switch\\)", offer(), certificate(labs.t, "switch"))
        refused("is not of lab-u", offer(), lab="lab-u")
        refused("incarnation 4 after 5", offer(incarnation=4))
        before = rules.read_bytes() if rules.exists() else None
        rules.write_text(OTHER_LABS)
        refused("lab-t", offer())
        rules.unlink() if before is None else rules.write_bytes(before)
        monkeypatch.setattr(between_labs, "LONGEST", datetime.timedelta(minutes=1))
        refused("is valid for .* days, .* at most 0 are allowed", offer())


def test_a_trainer_gets_newer_certificates_and_lists_while_it_runs(labs, monkeypatch):
    """A run may last for months, and a certificate five days."""
    monkeypatch.setattr(switch_client, "FRESH_SECONDS", 0.1)
    folder, issuer = labs.t.folder, authority.LocalAuthority(labs.s.folder)
    with contextlib.closing(
        switch_client.Trainer(folder, "fresh", "discriminator", "")
    ):
        with monkeypatch.context() as patched:
            # Its life begins a minute before it is issued: a fifth is over at once.
            life = datetime.timedelta(seconds=60)
            patched.setattr(authority, "LEAF_LIFETIME", life)
            trainer_keys.renew(folder)
        before = member.own_certificate(folder, "trainer")
        two_labs.wait_until(lambda: member.own_certificate(folder, "trainer") != before)
        issuer.admit("lab-x")
        number, listed = issuer.revoke("lab-x"), revocation.RevocationList
        two_labs.wait_until(lambda: listed(folder, "trainer").number == number)
