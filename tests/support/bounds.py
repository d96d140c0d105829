"""Limits on what refusing bad input may cost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 20.0
BYTES = 2**31


@contextmanager
def bounded(seconds: float = SECONDS, most_bytes: int = BYTES) -> Iterator[None]:
    """Fail if what follows takes more time, or if memory grows by more at any moment."""

    def stop(*_: object) -> None:
        raise AssertionError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    at_first = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    grown = _memory("VmHWM") - at_first
    assert grown < most_bytes, f"memory grew by {grown} bytes"


def _memory(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))
