"""Decodes many images in order, in several processes and with few of them in memory."""

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.synchronize import Event
from threading import Thread

import numpy as np

from trident.data.images import DatasetImage, ImageSource, UnreadableImageError, decode, naming_errors, silence_pillow
from trident.errors import ResumableError

_BATCH_BYTES = 2**20  # of decoded images that a process is given at once
_MOST_IN_A_BATCH = 64
_BATCHES_IN_FLIGHT = 3  # for each process

Decoded = np.ndarray | UnreadableImageError


@dataclass(frozen=True)
class Target:
    """What images are decoded to: (size, size, channels) uint8; see `decode`."""

    size: int
    channels: int
    inverted: bool = False

    def decode(self, source: ImageSource) -> np.ndarray:
        return decode(source, self.size, self.channels, self.inverted)


def available_cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decoded(sources: Sequence[DatasetImage], target: Target, workers: int) -> Iterator[Decoded]:
    """Each image's pixels, or why it cannot be read, in the order of the sources."""
    image_bytes = target.size**2 * target.channels
    at_once = max(1, min(_MOST_IN_A_BATCH, _BATCH_BYTES // image_bytes))
    batches = [sources[start : start + at_once] for start in range(0, len(sources), at_once)]
    if min(workers, len(batches)) <= 1:
        for source in sources:
            yield _decoded(source, target)
        return
    # Not forked from this process: it may have threads, and forking a process with threads can block the copy.
    context = get_context("forkserver")
    stop = context.Event()
    pool = ProcessPoolExecutor(min(workers, len(batches)), context, _start_worker, (stop, target))
    waiting: deque[tuple[Future[list[Decoded]], dict[int, UnreadableImageError]]] = deque()
    try:
        for batch in batches:
            if len(waiting) >= _BATCHES_IN_FLIGHT * workers:
                yield from _joined(*waiting.popleft())
            sent, failed = _portable(batch)
            waiting.append((pool.submit(_decode_batch, sent), failed))
        while waiting:
            yield from _joined(*waiting.popleft())
    except BrokenProcessPool as error:
        raise ResumableError("a process that decoded images was killed, perhaps for want of memory") from error
    finally:
        stop.set()  # on an error or Ctrl-C the processes do not finish their batches
        pool.shutdown(cancel_futures=True)


def _decoded(source: ImageSource, target: Target) -> Decoded:
    try:
        return target.decode(source)
    except UnreadableImageError as error:
        return error


def _portable(batch: Sequence[DatasetImage]) -> tuple[list[ImageSource], dict[int, UnreadableImageError]]:
    """What another process can open, and by their places the images that could not be loaded here."""
    sent: list[ImageSource] = []
    failed: dict[int, UnreadableImageError] = {}
    for place, source in enumerate(batch):
        try:
            with naming_errors(source):
                sent.append(source.portable())
        except UnreadableImageError as error:
            failed[place] = error
    return sent, failed


def _joined(future: "Future[list[Decoded]]", failed: dict[int, UnreadableImageError]) -> Iterator[Decoded]:
    results = iter(future.result())
    for place in range(len(failed) + len(future.result())):
        yield failed[place] if place in failed else next(results)


_stop: Event | None = None
_target: Target | None = None


def _start_worker(stop: Event, target: Target) -> None:
    global _stop, _target
    _stop, _target = stop, target
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops its workers
    silence_pillow()
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot stop its workers."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _decode_batch(sources: list[ImageSource]) -> list[Decoded]:
    assert _stop is not None and _target is not None
    found = []
    for source in sources:
        if _stop.is_set():
            break
        found.append(_decoded(source, _target))
    return found
