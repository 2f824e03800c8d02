"""The words for the entries of an audit log, by their kind."""

PHRASES: dict[str, tuple[str, dict[str, str]]] = {
    "federation": (
        "changed",
        {
            "name": "federation {}",
            "lab": "lab {}",
            "peer": "with {}",
            "address": "at {}",
            "host": "from {}",
        },
    ),
    "certificate": (
        "issued",
        {
            "lab": "the certificate of {}",
            "role": "for its {}",
            "serial": "number {}",
            "until": "until {}",
        },
    ),
    "account": (
        "changed",
        {"name": "account {}", "role": "as {}", "before": "from {}", "after": "to {}"},
    ),
    "login": ("logged in", {"name": "as {}"}),
    "grant": (
        "gave",
        {
            "number": "grant {}",
            "subject": "to {}",
            "operations": "for {}",
            "handle": "on {}",
            "rows": "up to {} rows",
            "nbytes": "up to {}",
            "until": "until {}",
        },
    ),
    "data": (
        "used",
        {
            "request": "request {}",
            "handle": "data {}",
            "operation": "for {}",
            "operations": "for {}",
            "rows": "with {} rows",
            "nbytes": "of {}",
            "job": "in job {}",
            "grant": "under grant {}",
            "why": "because: {}",
        },
    ),
    "job": ("began", {"job": "job {}", "commit": "at commit {}", "step": "at step {}"}),
    "session": (
        "opened",
        {
            "peer": "a session with {}",
            "lab": "a session with {}",
            "job": "for job {}",
            "sent": "after sending {}",
            "received": "and receiving {}",
            "reason": "because of {}",
        },
    ),
    "stream": (
        "carried",
        {
            "bytes": "{}",
            "frames": "in {} frames",
            "kind": "of {}",
            "job": "for job {}",
            "stream": "on stream {}",
            "direction": "({})",
            "peer": "with {}",
        },
    ),
    "checkpoint": (
        "saved",
        {"job": "a checkpoint of job {}", "step": "at step {}", "digest": "with {}"},
    ),
    "refusal": (
        "was refused",
        {
            "operation": "{}",
            "reason": "because of {}",
            "job": "in job {}",
            "peer": "with {}",
        },
    ),
    "fault": (
        "met a fault:",
        {
            "event": "{}",
            "fault": "{}",
            "peer": "with {}",
            "job": "in job {}",
            "step": "at step {}",
        },
    ),
    "audit": ("noted", {"lab": "lab {}"}),
}
"""Kind -> the verb of an entry without an event, and the words for its values in order.

An event is a verb in the past tense, unless a phrase takes it. A kind may go on after a
point: `account.add`. Values without words follow in parentheses.
"""

VERBS = {
    "account.add": "added",
    "account.activate": "activated",
    "account.suspend": "suspended",
    "account.resume": "resumed",
    "account.remove": "removed",
    "account.role": "changed the role of",
    "account.limits": "changed the limits of",
    "account.password": "changed the password of",
    "data.register": "registered",
    "data.withdraw": "withdrew",
    "data.request": "requested",
    "data.refuse": "refused",
    "grant.give": "gave",
    "grant.revoke": "revoked",
    "login.refused": "was refused a login",
}
"""A kind with a point -> its verb; of another, what stands after the point serves."""
