"""Chunks of tasks in parallel on a CPU.

One chunk per core is faster than all cores on one chunk: small tensors do not split well, and some of torch's kernels
use only one core. Single-core workers do not wait for each other within a product. torch's own threads do, which makes
them many times slower on a busy machine.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()  # held while torch's number of threads is 1 in the whole process


def parallel_map(work: Callable[[Item], Result], items: Sequence[Item], device: torch.device | str) -> Iterator[Result]:
    """`map` with one thread per CPU core. Yields the results in the order of the items, as soon as they are ready."""
    with _lock:  # or a new thread would keep the 1 that is set for a moment
        cores = torch.get_num_threads()
    if torch.device(device).type != "cpu" or min(cores, len(items)) <= 1:
        yield from map(work, items)
        return
    pool = _single_core_threads(min(cores, len(items)))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)


def _single_core_threads(n: int) -> ThreadPoolExecutor:
    """So many threads in which torch uses one core each. Other threads do not notice."""
    pool, met = ThreadPoolExecutor(n, "trident-core"), threading.Barrier(n)

    def start(_: int) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # the number takes effect only when a thread first reads it
        met.wait()  # so that every thread runs this exactly once

    with _lock:
        cores = torch.get_num_threads()
        list(pool.map(start, range(n)))
        torch.set_num_threads(cores)  # the new threads changed that of the whole process
    return pool
