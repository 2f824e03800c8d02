"""What every test has: eight host devices, JAX's checks, and a cache of programs.

Settings are environment variables, so that the processes that tests start have them.
"""

import concurrent.futures
import contextlib
import functools
import gc
import os
import pathlib
import shutil
from importlib.metadata import version

import clocks
import hypothesis
import pytest

# XLA ends the process at a flag that it does not know: this one is gone since JAX 0.11.
OLD_FLAGS = ["--xla_cpu_use_fusion_emitters=false"] * version("jax").startswith("0.10.")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",  # sharding without a cluster
        # Most of a test's time is compilation of programs that run a few times.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        *OLD_FLAGS,
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
# Each of the many processes that tests start would compile the project's modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    # Where in the source an operation stands: nothing reads it, and to write it takes
    # time in every compilation.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS": "false",
    # From host to device stays "allow": "disallow" refuses `x + 1` and `jnp.zeros(3)`
    # outside of jit. Tests of the training steps turn it on around a step.
    "JAX_TRANSFER_GUARD_DEVICE_TO_HOST": "disallow",
    "JAX_TRANSFER_GUARD_DEVICE_TO_DEVICE": "disallow",
}

# Programs that an earlier run compiled, or another process of this one. JAX writes an
# entry in place: one that a killed process left half-written, or that is read too soon,
# is compiled again, with a warning.
_USER_CACHE = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
_PROGRAMS = pathlib.Path(_USER_CACHE) / "nebula_jax" / "compiled_tests"
_MOST_BYTES = 2 * 2**30  # entries of code that has changed since are never used again
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_PROGRAMS))
os.environ |= {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

# Tests write many small files and wait until they are on the disk: in memory, a slow
# disk does not count. A run of all tests leaves some 300 MB until the next one.
_MEMORY, _LEAST_BYTES = pathlib.Path("/dev/shm"), 4 * 2**30
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _LEAST_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# JAX makes many objects that live on: for every 700 of them, Python's threshold, the
# collector and JAX's own would look through what there is.
gc.set_threshold(50_000, 20, 100)

# Of an example: a busy machine may have other work for longer than 200 ms.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_sessionstart(session):
    """Empties the cache when it has grown large; before any worker begins."""
    if hasattr(session.config, "workerinput") or not _PROGRAMS.is_dir():
        return
    if sum(path.stat().st_size for path in _PROGRAMS.iterdir()) > _MOST_BYTES:
        shutil.rmtree(_PROGRAMS, ignore_errors=True)


SLOW_SECONDS = 1800
LONGEST = (
    *("experiments", "runtime", "parallel", "training", "models", "federation"),
    *("scripts", "simulation", "communication", "security", "test_installed.py"),
)
"""Folders of tests, and a file, that take long, the longest first."""


def pytest_collection_modifyitems(items):
    """Begins with the longest; gives slow tests a time limit of their own."""
    # A long file at the end would keep one worker busy while the other has none.
    items.sort(key=lambda item: min(map(LONGEST.index, _long(item)), default=99))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


_MOST_MAPS = 30_000  # of the kernel's 65,530 (vm.max_map_count)


@pytest.fixture(autouse=True, scope="session")
def flags_of_grain():
    """Defines them: those that come within a flagsaver's block go with it."""
    import grain  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_do_not_pile_up():
    """Forgets them when a process has very many: XLA maps each kernel of a program into
    memory for itself, some 150 times a training step, and dies by SIGSEGV where Linux
    allows no more."""
    yield
    if len(pathlib.Path("/proc/self/maps").read_bytes().splitlines()) > _MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def clock():
    """A clock that the test moves."""
    return clocks.Clock()


@pytest.fixture
def pool():
    """Threads in which the other side of a test works."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def stack():
    """What a test opens, and what is closed after it."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def star(stack):
    """Makes a hub with its leaves."""
    import quorum_star  # not before the environment is set

    return functools.partial(quorum_star.Star, stack)


RANDOM = ("training", "models", "evaluation")  # folders of code that draws


def _long(item):
    """Those of LONGEST that a test lies in."""
    return set(LONGEST) & set(item.path.parts)


@pytest.fixture(autouse=True)
def no_key_is_used_twice(request):
    """Makes it an error; the check takes a tenth of all compilation."""
    import jax  # not before the environment is set

    with jax.debug_key_reuse(not set(RANDOM).isdisjoint(request.path.parts)):
        yield


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    """Two labs whose switches run and have a line, for the tests of a module."""
    import two_labs  # not before the environment is set

    with two_labs.two_labs(tmp_path_factory.mktemp("labs")) as made:
        yield made
