"""Freed memory stays with the process, to be used again.

XLA asks malloc for the buffers of every step anew. glibc takes large ones from the
kernel and hands them back when they are freed, so that each step pays for every page
of them as if it were the first: a quarter of a fine-tuning step on a CPU (1.15 s with,
0.86 s without, `scripts.bench_training`, two cores). The price of keeping them: a
process that needed much memory once holds it to its end.
"""

import ctypes
import os
import platform

# Of <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = -1
_STEP_BYTES = 256 << 20  # what the heap grows by


def keep() -> bool:
    """Tells glibc's malloc to hand nothing back; call it before XLA begins.

    Returns:
      Whether it was told: not where there is no glibc, nor where the environment has
      settings of its own for it (MALLOC_..., GLIBC_TUNABLES).
    """
    is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] != "glibc" or is_set:
        return False
    options = (
        (_MMAP_MAX, 0),
        (_TRIM_THRESHOLD, _NEVER),
        (_TOP_PAD, _STEP_BYTES),
        # Arenas of threads hold 64 MiB at most, and grow and shrink by the buffer.
        (_ARENA_MAX, 1),
    )
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(option, value) for option, value in options])
