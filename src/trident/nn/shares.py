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


def in_shares(work: Callable[[slice], Result], n: int) -> list[Result]:
    """Run `work` on each core's share of n items, without autograd. Return the results."""
    cores = torch.get_num_threads()
    shares = [slice(core * n // cores, (core + 1) * n // cores) for core in range(cores)]
    shares = [share for share in shares if share.start < share.stop]
    work = torch.no_grad()(work)
    return [work(share) for share in shares] if len(shares) == 1 else list(_thread_pool(cores).map(work, shares))


@functools.cache
def _thread_pool(cores: int) -> ThreadPoolExecutor:
    """Single-core threads that stay alive, because they are needed every few milliseconds."""
    pool = ThreadPoolExecutor(cores, "trident-share")
    met = threading.Barrier(cores)

    def start(_: int) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # the number takes effect only when a thread first reads it
        met.wait()  # so that every thread runs this exactly once

    list(pool.map(start, range(cores)))
    torch.set_num_threads(cores)  # the workers changed the default for new threads
    return pool
