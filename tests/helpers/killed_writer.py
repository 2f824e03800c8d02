"""Kills a process at each line that writes: `python killed_writer.py FOLDER WHAT`.

FOLDER has what `prepare` makes. A child does WHAT and is killed (SIGKILL, by itself)
before the first line of the code that writes the file, the next child before its
second, until one is done. What each leaves is printed, a line of JSON a child.
"""

import json
import os
import pathlib
import signal
import sys

import tiny_accounts

from nebula_jax import disk, files
from nebula_jax.security import grants, private_files
from nebula_jax.security import store as store_lib

WRITERS = {each.__file__ for each in (disk, files, private_files, store_lib)}


def prepare(folder):
    here = tiny_accounts.begin(folder)
    tiny_accounts.person(here, "ana")
    tiny_accounts.handle(here)
    tiny_accounts.grant(here, "ana", rows=1000)


def use(here):
    grants.Grants(here).use("ana", "corpus-es", 16, tiny_accounts.NOW)


def suspend(here):
    here.move("ana", "suspend")


def child(here, action, fatal):
    """Does it, and is killed before its line number `fatal` of those that write."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename not in WRITERS:
            return None
        seen += event == "line"
        if seen == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    action(here)


def main(folder, what):
    here = tiny_accounts.reopen(folder)
    print(json.dumps(here.store.read()))
    before = here.store.path.read_text()
    for fatal in range(1, 1000):
        pid = os.fork()
        if not pid:
            child(here, globals()[what], fatal)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(here.store.read()))
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        private_files.write(here.store.path, before)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2]))
