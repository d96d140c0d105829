"""Chunks of tasks in parallel on a CPU.

One chunk per core is faster than all cores on one chunk: small tensors do not split well, and some of torch's kernels
use only one core.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from trident.nn.shares import single_core_threads, torch_threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(work: Callable[[Item], Result], items: Sequence[Item], device: torch.device | str) -> Iterator[Result]:
    """`map` with one thread per CPU core. Yields the results in the order of the items, as soon as they are ready."""
    cores = torch_threads()
    if torch.device(device).type != "cpu" or min(cores, len(items)) <= 1:
        yield from map(work, items)
        return
    pool = single_core_threads(min(cores, len(items)))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
