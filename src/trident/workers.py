"""Work side by side on a CPU: chunks of tasks, or the images of one.

One worker for each core, each with a chunk of its own, does more than all cores on one chunk: small tensors do not
split well, and some of torch's kernels use one core whatever they are offered. Workers do not wait for each other in
between, either, which is what makes torch's matrix products many times slower on a machine that is busy elsewhere.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], device: torch.device | str) -> Iterator[Result]:
    """The results in the items' order, each as soon as it and those before it are there."""
    cores = torch.get_num_threads()
    if torch.device(device).type != "cpu" or cores == 1 or len(items) == 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(min(cores, len(items)), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # what the workers set is also the default of threads still to come


def in_shares(work: Callable[[slice], Result], n: int) -> list[Result]:
    """What comes of each core's share of n images or the like. Takes no part in autograd."""
    cores = torch.get_num_threads()
    shares = [slice(core * n // cores, (core + 1) * n // cores) for core in range(cores)]
    shares = [share for share in shares if share.start < share.stop]
    work = torch.no_grad()(work)
    return [work(share) for share in shares] if len(shares) == 1 else list(_crew(cores).map(work, shares))


@functools.cache
def _crew(cores: int) -> ThreadPoolExecutor:
    """Threads that stay, as they are needed every few milliseconds, each of them with one core."""
    crew = ThreadPoolExecutor(cores, "trident-share")
    met = threading.Barrier(cores)

    def start(_: int) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread adopts the number for good when it first asks for it, not before
        met.wait()  # so that no thread starts twice and none is left out

    list(crew.map(start, range(cores)))
    torch.set_num_threads(cores)  # what they set is also the default of threads still to come
    return crew
