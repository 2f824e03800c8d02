"""What a trainer asks of each peer, before anything is sealed with it."""

import contextlib
import datetime

import pytest
from cryptography.hazmat.primitives import serialization

from nebula_jax import errors
from nebula_jax.federation import switch_client
from nebula_jax.security import incarnations, policy, seal
from nebula_jax.security.membership import member
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
