"""Freed memory is kept for the next batch."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys, threading
import trident.allocator
if sys.argv[1:]:
    trident.allocator.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def use():
    block = libc.malloc(1 << 26)
    libc.memset(block, 1, 1 << 26)
    libc.free(block)
def use_often():
    for _ in range(5):
        use()
def in_a_thread():  # as batches are computed side by side
    thread = threading.Thread(target=use_often)
    thread.start()
    thread.join()
use()
in_a_thread()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use_often()
in_a_thread()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc's allocator")
def test_large_blocks_are_used_again_by_commands_unless_the_environment_says_otherwise() -> None:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}

    def faults(*arguments: str, **environment: str) -> int:
        command = [sys.executable, "-c", FAULTS, *arguments]
        return int(subprocess.run(command, env=plain | environment, capture_output=True, check=True).stdout)

    assert faults("as a command") < 100
    assert faults("as a command", MALLOC_ARENA_MAX="8") > 100  # 64 MiB are 16,384 pages, or 32 large ones
    assert faults() > 100  # importing the package changes nothing
