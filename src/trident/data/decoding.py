"""Decodes many images in order, in several processes and with few of them in memory."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from trident.data.decoding_process import DecodingProcesses, KilledError, decoders
from trident.data.images import DatasetImage, ImageFile, ImageSource, Target, UnreadableImageError, in_memory
from trident.errors import ResumableError

_BATCH_BYTES = 2**20  # of decoded images that a process is given at once
_MOST_IN_A_BATCH = 64
_BATCHES_IN_FLIGHT = 3  # for each process

Decoded = np.ndarray | UnreadableImageError


def available_cores() -> int:
    """The number of cores that this process may use, or of all cores if the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decoded(sources: Sequence[DatasetImage], target: Target, workers: int) -> Iterator[Decoded]:
    """Each image's pixels, or why it cannot be read, in the order of the sources."""
    image_bytes = target.size**2 * target.channels
    at_once = max(1, min(_MOST_IN_A_BATCH, _BATCH_BYTES // image_bytes))
    batches = [sources[start : start + at_once] for start in range(0, len(sources), at_once)]
    if min(workers, len(batches)) <= 1:
        for source in sources:
            yield _decoded(decoders, source, target)
        return
    processes = DecodingProcesses()
    threads = ThreadPoolExecutor(min(workers, len(batches)))  # each waits for a process of its own
    waiting: deque[Future[list[Decoded]]] = deque()
    try:
        for batch in batches:
            if len(waiting) >= _BATCHES_IN_FLIGHT * workers:
                yield from waiting.popleft().result()
            waiting.append(threads.submit(_decode_batch, processes, _portable(batch), target))
        while waiting:
            yield from waiting.popleft().result()
    finally:
        processes.close()  # on an error or Ctrl-C they do not finish their batches
        threads.shutdown(cancel_futures=True)


def _portable(batch: Sequence[DatasetImage]) -> list[ImageSource | UnreadableImageError]:
    """What another thread can read. Pickles and zip files are read in this one only; a file waits for its turn."""
    loaded: list[ImageSource | UnreadableImageError] = []
    for source in batch:
        try:
            loaded.append(source if isinstance(source, ImageFile) else in_memory(source))
        except UnreadableImageError as error:
            loaded.append(error)
    return loaded


def _decode_batch(
    processes: DecodingProcesses, batch: list[ImageSource | UnreadableImageError], target: Target
) -> list[Decoded]:
    return [one if isinstance(one, UnreadableImageError) else _decoded(processes, one, target) for one in batch]


def _decoded(processes: DecodingProcesses, source: ImageSource, target: Target) -> Decoded:
    try:
        return processes.decode(source, target)
    except KilledError as error:
        raise ResumableError("a process that decoded images was killed, perhaps because memory ran out") from error
    except UnreadableImageError as error:
        return error
