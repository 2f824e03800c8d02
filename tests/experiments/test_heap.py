import os
import platform
import subprocess
import sys

import pytest

from experiments import heap

PROGRAM = """
import ctypes, resource, sys
from experiments import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

told = sys.argv[1] == "keep" and heap.keep()
ctypes.create_string_buffer(64 << 20)
before = faults()
for _ in range(4):
    ctypes.create_string_buffer(64 << 20)
print(told, faults() - before)
"""


def run(what, **more):
    """Whether malloc was told, and how many pages four large buffers cost."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        env=environment | more,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told, faults = found.stdout.split()
    return told == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_is_used_again():
    _, before = run("leave")
    told, after = run("keep")
    assert told
    # Where the kernel gives huge pages unasked, both are few.
    assert after <= max(before / 10, 100)


def test_settings_of_the_environment_win():
    told, _ = run("keep", MALLOC_MMAP_THRESHOLD_="1048576")
    assert not told


def test_does_nothing_without_glibc(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert not heap.keep()
