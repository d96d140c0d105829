"""Chunks of tasks side by side on a CPU.

One worker for each core, each with a chunk of its own, does more than all cores on one chunk: small tensors do not
split well, and some of torch's kernels use one core whatever they are offered.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], device: torch.device | str) -> Iterator[Result]:
    """The results in the items' order, each as soon as it and those before it are there."""
    cores = torch.get_num_threads()
    if torch.device(device).type != "cpu" or min(cores, len(items)) <= 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(min(cores, len(items)), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # what the workers set is also the default of threads still to come
