"""What torchrun tells each process that it starts. Nothing here imports torch."""

import os
from typing import NamedTuple

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Launched(NamedTuple):
    """This process's place among those that torchrun started."""

    rank: int  # among the processes of all machines
    size: int  # number of processes on all machines
    local_rank: int  # among the processes of this machine
    restarts: int  # how often torchrun has started the processes again


def launched() -> Launched | None:
    """None in a process that torchrun did not start."""
    if any(name not in os.environ for name in _VARIABLES):
        return None
    rank, size, local_rank = (int(os.environ[name]) for name in _VARIABLES[:3])
    return Launched(rank, size, local_rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
