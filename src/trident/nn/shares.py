"""Split the images of one task over a CPU's cores.

Single-core workers do not wait for each other within a product. torch's own threads do, which makes them many times
slower on a busy machine.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")

_lock = threading.Lock()  # held while torch's number of threads is 1 in the whole process


def in_shares(work: Callable[[slice], Result], n: int) -> list[Result]:
    """Run `work` on each core's share of n items, without autograd. Return the results."""
    cores = torch_threads()
    shares = [slice(core * n // cores, (core + 1) * n // cores) for core in range(cores)]
    shares = [share for share in shares if share.start < share.stop]
    work = torch.no_grad()(work)
    return [work(share) for share in shares] if len(shares) == 1 else list(_lasting(cores).map(work, shares))


def torch_threads() -> int:
    """The number of torch threads.

    Takes the lock, because a new thread would otherwise keep the 1 that is set for a moment.
    """
    with _lock:
        return torch.get_num_threads()


def single_core_threads(n: int) -> ThreadPoolExecutor:
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


_lasting = functools.cache(single_core_threads)  # kept alive, because they are needed every few milliseconds
