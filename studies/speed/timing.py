"""Measure time and memory of a function, and name the device."""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from trident.progress import Progress

Result = TypeVar("Result")
_WARM_UPS = {"cpu": 1, "cuda": 3}  # a GPU's first calls compile, select kernels and allocate memory


class Memory(NamedTuple):
    """Peak memory in GiB. On a CPU it is that of the whole process since its start."""

    peak: float
    reserved: float | None  # GPU memory that torch reserved, used or not


@dataclass(frozen=True)
class Measurement(Generic[Result]):
    warm_up: float  # seconds before the first timed round
    rounds: tuple[float, ...]  # seconds of each timed round
    memory: Memory
    result: Result  # of the last round

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)


def measure(
    prepare: Callable[[], Callable[[], Result]], device: str, rounds: int, progress: Progress
) -> Measurement[Result]:
    """Prepare the work, warm up, then time it for some rounds."""
    kind = torch.device(device).type
    _reset_peak(device)
    start = _now(device)
    work = prepare()
    for _ in range(_WARM_UPS[kind]):
        work()
    warm_up = _now(device) - start
    times = []
    for done in range(1, rounds + 1):
        seconds, result = timed(work, device)
        times.append(seconds)
        progress(done, rounds)
    return Measurement(warm_up, tuple(times), _peak(device), result)


def timed(work: Callable[[], Result], device: str) -> tuple[float, Result]:
    start = _now(device)
    result = work()
    return _now(device) - start, result


def _now(device: str) -> float:
    """The time after the device has finished its pending work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: str) -> Memory:
    if torch.device(device).type == "cuda":
        return Memory(torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30)
    return Memory(gib_of(resource.getrusage(resource.RUSAGE_SELF)), None)


def gib_of(usage: resource.struct_rusage) -> float:
    """The peak memory of a process."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return usage.ru_maxrss * unit / 2**30
