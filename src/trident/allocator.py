"""Settings of the memory allocator. Commands make them before torch is loaded; `import trident` changes nothing."""

import ctypes
import os

KEPT = 1 << 30  # bytes of freed memory at the end of the heap from which on glibc gives some back
# glibc's names for numbers that mallopt takes (malloc.h)
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory instead of returning it to the system at once.

    The next batch of images needs it again; without it, half of the time on a CPU can be page faults. The price: a
    process may hold as much memory as it once needed. Nothing is changed if the environment has settings for glibc's
    allocator already, as in `MALLOC_ARENA_MAX=8 trident predict ...`.
    """
    # mimalloc, torch's allocator on Arm, keeps freed memory for 10 ms. It reads this once, when torch is loaded.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")  # milliseconds
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # not glibc
        return
    # Blocks of their own from the system (mmap) always go back to it; so do large blocks of a thread's own arena.
    for parameter, value in ((_MMAP_MAX, 0), (_ARENA_MAX, 1), (_TRIM_THRESHOLD, KEPT)):
        mallopt(parameter, value)
