"""Ctrl-C and SIGTERM during training: the current step is finished and the run is saved."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def watch_for_interrupts(announce: bool = True) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C or SIGTERM has arrived. A second Ctrl-C stops at once.

    A second SIGTERM does not: `timeout` sends two, one to the process and one to its group. Call the function from the
    main thread: it sets the handlers again each time, because LLVM replaces them when Triton first compiles.

    `announce`: whether the first signal prints a line.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if len(received) == 1 and announce:
            with suppress(OSError):  # standard error may be closed; the run is still saved
                os.write(2, b"\nstopping after this step; a second Ctrl-C stops at once and loses unsaved steps\n")

    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupted() -> bool:
        for number in signals:
            signal.signal(number, note)
        return bool(received)

    try:
        before = [signal.signal(number, note) for number in signals]
    except ValueError:  # not in the main thread, where signals do not arrive
        yield lambda: False
        return
    try:
        yield interrupted
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
