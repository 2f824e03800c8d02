"""Kills a process at each statement that writes: `python killed_writer.py FOLDER WHAT`.

FOLDER has what `prepare` makes. A child does WHAT and is killed (SIGKILL, by itself)
before its first statement that writes, the next child before its second, until one is
done. What each leaves in the store is printed, a line of JSON a child.
"""

import json
import os
import pathlib
import signal
import sys

import tiny_accounts

from nebula_jax.security import grants
from nebula_jax.security.accounts import logins

WRITES = ("BEGIN", "UPDATE", "INSERT", "DELETE", "COMMIT")


def prepare(folder):
    with tiny_accounts.begin(folder) as here:
        tiny_accounts.person(here, "ana")
        owner = tiny_accounts.owner(here)
        tiny_accounts.handle(here, owner)
        tiny_accounts.grant(here, owner, "ana", grants.Budget(1000))
        logins.login(here, "ana", tiny_accounts.PASSWORD, tiny_accounts.NOW)


def use(here, owner):
    grants.Grants(here.store).use("ana", "corpus-es", 16, 64, tiny_accounts.NOW)


def give(here, owner):
    tiny_accounts.grant(here, owner, "ana", grants.Budget(5))


def suspend(here, owner):
    here.move(owner, "ana", "suspend")


def add(here, owner):
    tiny_accounts.person(here, "ben")


def charge(here, owner):
    here.charge("ana", 7)


def state(folder):
    """What is in the store: anything that one of the actions changes."""
    with tiny_accounts.reopen(folder) as here:
        ana, names = here.find("ana"), [each.name for each in here.listing()]
        tokens = "SELECT count(*) FROM tokens WHERE account = 'ana'"
        return {
            "ana": [ana.state, here.store.rows(tokens)[0][0], ana.charged_bytes],
            "ben": "ben" in names and logins.has_password(here, "ben"),
            "grants": [
                [each.number, each.state, each.rows_used, each.nbytes_used]
                for each in grants.Grants(here.store).listing()
            ],
            "findings": here.store.findings(),
        }


def child(folder, action, fatal):
    """Does it, and is killed before its statement number `fatal` that writes."""
    with tiny_accounts.reopen(folder) as here:
        here.store.rows("PRAGMA synchronous = FULL")  # as it is
        owner, seen = tiny_accounts.owner(here), 0

        def trace(statement):
            nonlocal seen
            seen += statement.startswith(WRITES)
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

        here.store._connection.set_trace_callback(trace)
        action(here, owner)


def main(folder, what):
    print(json.dumps(state(folder)))
    for fatal in range(1, 100):
        pid = os.fork()
        if not pid:
            child(folder, globals()[what], fatal)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(state(folder)))
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2]))
