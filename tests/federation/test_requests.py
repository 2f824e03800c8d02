"""The names in requests of trainers and of other switches."""

import pytest

from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import requests, streams

ABOUT = streams.About(
    "0" * 16, "m3", "ana@lab-s", "generator:0", "discriminator", "lab-s"
)
SECRET = f"nebula1.{'a' * 16}"  # as an invitation begins: the audit log refuses it


@pytest.mark.parametrize("job", ["m3", "M3.es_2-x", "nebula1.es", "x" * 64])
def test_a_job_may_have_a_name_that_the_audit_log_takes(job):
    assert requests.is_job(job)
    requests.check_about(ABOUT._replace(job=job))


@pytest.mark.parametrize("job", ["", "-m3", "a/b", "x" * 65, SECRET, f"x.{SECRET}.y"])
def test_a_job_that_the_audit_log_would_not_take_is_none(job):
    assert not requests.is_job(job)
    with pytest.raises(json_lines.Malformed):
        requests.check_about(ABOUT._replace(job=job))
