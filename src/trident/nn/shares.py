"""The images of one task shared out among a CPU's cores.

Workers with one core each do not wait for each other within a product, which is what makes torch's own threads many
times slower on a machine that is busy elsewhere.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


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
