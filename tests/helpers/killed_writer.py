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

WRITES = ("BEGIN", "UPDATE", "INSERT", "DELETE", "COMMIT")


def prepare(folder):
    with tiny_accounts.begin(folder) as here:
        tiny_accounts.person(here, "ana")
        tiny_accounts.handle(here)
        tiny_accounts.grant(here, "ana", grants.Budget(1000))


def use(here):
    grants.Grants(here).use("ana", "corpus-es", 16, 64, tiny_accounts.NOW)


def give(here):
    tiny_accounts.grant(here, "ana", grants.Budget(5))


def suspend(here):
    here.move("ana", "suspend")


def add(here):
    tiny_accounts.person(here, "ben")


def charge(here):
    here.charge("ana", 7)


def state(folder):
    """What is in the store: anything that one of the actions changes."""
    with tiny_accounts.reopen(folder) as here:
        ana, names = here.find("ana"), [each.name for each in here.listing()]
        return {
            "ana": [ana.state, ana.charged_bytes],
            "ben": "ben" in names,
            "grants": [
                [each.number, each.state, each.rows_used, each.nbytes_used]
                for each in grants.Grants(here).listing()
            ],
            "findings": here.store.findings(),
        }


def child(folder, action, fatal):
    """Does it, and is killed before its statement number `fatal` that writes."""
    with tiny_accounts.reopen(folder) as here:
        here.store.rows("PRAGMA synchronous = FULL")  # as it is
        seen = 0

        def trace(statement):
            nonlocal seen
            seen += statement.startswith(WRITES)
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

        here.store._connection.set_trace_callback(trace)
        action(here)


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
