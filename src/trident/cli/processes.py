"""Commands on several processes, which torchrun starts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from trident.cli import options as opt
from trident.distributed.torchrun import launched

if TYPE_CHECKING:
    from trident.data.store import ImageStore
    from trident.distributed.processes import Processes
    from trident.learning.checkpoint import Checkpoint


class ThisProcess(NamedTuple):
    """This process and its place among those that torchrun started."""

    processes: "Processes"  # all of them, and which one this is
    device: str
    restarts: int  # how often torchrun has started the processes again

    def measured(
        self, load: Callable[[], "Checkpoint"], data: str | None, store_on: str, split: str
    ) -> tuple["Checkpoint", "ImageStore"]:
        """The checkpoint to measure, which the first process loads, and the store, which each opens."""
        from trident.learning.distributed import check_same_inputs, checkpoint_from_first

        checkpoint = checkpoint_from_first(self.processes, load)
        store = self.processes.on_each(lambda: opt.open_for(checkpoint.recipe, data, checkpoint, store_on, split))
        check_same_inputs(self.processes, checkpoint.recipe, store)
        return checkpoint, store


@contextmanager
def on_processes(device: str) -> Iterator[ThisProcess]:
    """Connects this process with the others that torchrun started, if it did. The first alone prints progress."""
    from trident.cli.console import stderr
    from trident.distributed.processes import ALONE, connected

    place = launched()
    if place is None:
        yield ThisProcess(ALONE, opt.device_of(device), restarts=0)
        return
    import torch

    # Processes that share one GPU, which has to be named, must do without NCCL.
    nccl = device in ("auto", "cuda") and torch.cuda.is_available()
    stderr.quiet = place.rank > 0
    with connected(place, nccl) as processes:
        own = processes.on_each(lambda: opt.device_of(device, place.local_rank))
        if own.startswith("cuda"):
            torch.cuda.set_device(own)
        yield ThisProcess(processes, own, place.restarts)
