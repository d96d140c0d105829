"""Several processes that work on the same thing. torchrun starts them; torch.distributed connects them.

Every process runs the same code. `Processes` says which one this is, and lets them exchange results. All must call its
methods in the same order, because each call waits for the others. `ALONE` is the only process of an ordinary program.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # it is there, but not in __all__
from torch.distributed.rendezvous import rendezvous

from trident.distributed.torchrun import Launched
from trident.errors import LostProcessError, TridentError

Value = TypeVar("Value")


class Processes:
    """One process alone. `_Connected` is one of several."""

    rank = 0
    size = 1
    alone = True  # whether this process runs without torchrun

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and saves."""
        return self.rank == 0

    def block(self, items: range) -> range:
        """This process's share of the items: a contiguous block. The shares differ in size by at most one."""
        return items[self.rank * len(items) // self.size : (self.rank + 1) * len(items) // self.size]

    def sum(self, values: Tensor) -> None:
        """Replace values by their sum over all processes. Every process gets the same bits."""

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors by those of the first process."""

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, in their order."""
        return [value]

    def from_first(self, work: Callable[[], Value]) -> Value:
        """Run `work` on the first process and return its result on all. If it fails, all processes raise its error."""
        return work()

    def on_each(self, work: Callable[[], Value]) -> Value:
        """Run `work` on each process and return its own result. If one fails, all raise the same error."""
        return work()

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Raise an error if a fact is not the same in all processes."""


ALONE = Processes()


class _Connected(Processes):
    alone = False

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    def sum(self, values: Tensor) -> None:
        with _reporting_lost_processes():
            distributed.all_reduce(values)

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        with _reporting_lost_processes():
            for tensor in tensors:
                distributed.broadcast(tensor.detach(), 0)

    def gather(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.size
        with _reporting_lost_processes():
            distributed.all_gather_object(values, value)
        return values

    def from_first(self, work: Callable[[], Value]) -> Value:
        attempt: list[Any] = [_attempt(work) if self.first else None]
        with _reporting_lost_processes():
            distributed.broadcast_object_list(attempt, 0)
        [(value, problem)] = attempt
        _raise_first(problem)
        return cast(Value, value)

    def on_each(self, work: Callable[[], Value]) -> Value:
        value, problem = _attempt(work)
        _raise_first(*self.gather(problem))
        return cast(Value, value)

    def check_same(self, facts: Mapping[str, object]) -> None:
        everyone = self.gather({name: str(value) for name, value in facts.items()})
        for rank, theirs in enumerate(everyone):
            for name in everyone[0] | theirs:
                first, other = everyone[0].get(name, "missing"), theirs.get(name, "missing")
                if first != other:
                    differ = f"{name} is {first} in process 0 and {other} in process {rank}"
                    raise shared(TridentError(f"{differ}: it must be the same in all processes"))


@contextmanager
def connected(launched: Launched, nccl: bool) -> Iterator[Processes]:
    """The processes that torchrun started.

    Objects travel by gloo, between CPUs. Tensors on GPUs travel by NCCL if wanted, which needs a GPU for each process.
    """
    # The functions of this module have the process group of the moment as a default argument. Imported later, by an
    # optimiser, they would keep ours alive after its end; its threads may then crash a program that is done.
    import torch.distributed.nn.functional  # noqa: F401

    rank, size = launched.rank, launched.size
    with _reporting_lost_processes():
        kept, _, _ = next(rendezvous("env://", rank, size))
        # torchrun keeps its store when it starts the processes again, with the addresses of those that have ended.
        store = PrefixStore(f"trident/{launched.restarts}/{size}", kept)
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    processes = _Connected(rank, size)
    yield processes
    # Only after success: after an error this could wait for processes that have ended. All end together, because
    # torchrun ends those that are left if one ends with another status than 0, as an interrupted run does.
    processes.gather(None)
    distributed.destroy_process_group()


def shared(error: TridentError) -> TridentError:
    """An error that all processes raise, so that the first alone prints it."""
    error.shared = True
    return error


_Problem = tuple[type[TridentError], str] | None  # an error's type and message


def _attempt(work: Callable[[], Value]) -> tuple[Value | None, _Problem]:
    try:
        return work(), None
    except TridentError as error:
        return None, (type(error), str(error))


def _raise_first(*problems: _Problem) -> None:
    for kind, message in filter(None, problems):
        raise shared(kind(message))


@contextmanager
def _reporting_lost_processes() -> Iterator[None]:
    """Raise a LostProcessError where torch.distributed raises a RuntimeError, because a connection was lost."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = re.sub(r"^\[\S+\] ", "", str(error).split("\n")[0])  # without the line of gloo's source
        raise shared(LostProcessError(f"another process has ended, or cannot be reached ({reason})")) from error
