import os
import subprocess
import sys

import pytest

from experiments import heap

PROGRAM = """
import ctypes, resource
from experiments import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(heap.keep())
ctypes.create_string_buffer(64 << 20)
before = faults()
for _ in range(4):
    ctypes.create_string_buffer(64 << 20)
print(faults() - before)
"""
PAGES = (64 << 20) // os.sysconf("SC_PAGE_SIZE")


def run(**environment):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told, faults = found.stdout.split()
    return told == "True", int(faults)


def test_freed_memory_is_used_again():
    told, faults = run()
    if not told:
        pytest.skip("no glibc here, or it has settings of its own")
    assert faults < PAGES / 10


def test_settings_of_the_environment_win():
    told, faults = run(MALLOC_MMAP_THRESHOLD_="1048576")
    assert not told
    assert faults > PAGES


def test_does_nothing_without_glibc(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert not heap.keep()
