"""Starts `trident` on several processes by torchrun's own agent, but forked from a process that has loaded torch.

Loading torch takes seconds for each process. `python launcher.py` reads one order (a line of JSON) after another and
answers each with a line: whether all processes succeeded. Their standard output and error go to files.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.tensorboard  # takes seconds
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import trident
import trident.engines.plain.inner_loop
from trident.cli import main
from trident.distributed.torchrun import launched
from trident.learning import step_gradient
from trident.measuring import evaluate
from trident.tasks.images import Images
from trident.tasks.source import TaskSource


def in_doubles() -> None:
    """Weights, images and noise in float64."""
    torch.set_default_dtype(torch.float64)
    at, noise = Images.at, TaskSource._noise

    def doubled(self: Images, positions: np.ndarray) -> torch.Tensor:
        found = at(self, positions)
        return found.double() / 255 if found.dtype == torch.uint8 else found.double()

    def doubled_noise(self: TaskSource, generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        return noise(self, generator, shape).astype(np.float64)

    Images.at = doubled  # type: ignore[method-assign]
    TaskSource._noise = doubled_noise  # type: ignore[method-assign]


def killing(rank: int, step: int, number: int) -> None:
    """Before it computes a step, one process sends itself a signal. Only in the first attempt."""
    place, batches = launched(), step_gradient.StepGradient.batches
    if place is None or place.rank != rank or place.restarts:
        return

    def then(self: step_gradient.StepGradient, now: int) -> Any:
        if now == step:
            os.kill(os.getpid(), number)
        return batches(self, now)

    step_gradient.StepGradient.batches = then  # type: ignore[method-assign, assignment]


def killing_later(*attempts: tuple[list[int], float]) -> None:
    """Some processes are killed after some time, whatever they do then: which and when, for each attempt."""
    place = launched()
    if place is not None and place.restarts < len(attempts) and place.rank in attempts[place.restarts][0]:
        timer = threading.Timer(attempts[place.restarts][1], os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def stopping_in_validation(rank: int) -> None:
    """One process gets a request to terminate while it validates."""
    place, predicted = launched(), evaluate._predicted

    def then(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return predicted(*arguments)

    if place is not None and place.rank == rank:
        evaluate._predicted = then  # type: ignore[assignment]


def work(order: dict[str, Any]) -> None:
    """The command, in one of the processes."""
    place = launched()
    rank = 0 if place is None else place.rank
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a fork has those of torchrun
    os.chdir(order["folder"])
    if order.get("doubles"):
        in_doubles()
    if "kill" in order:
        killing(*order["kill"])
    if "kill_later" in order:
        killing_later(*order["kill_later"])
    if "stop_in_validation" in order:
        stopping_in_validation(order["stop_in_validation"])
    if rank == 1:
        trident.__version__ = order.get("version_of_process_1", trident.__version__)
    arguments = order["arguments"][min(rank, len(order["arguments"]) - 1)]  # the last serve all further processes
    sys.argv = ["trident", *arguments]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        if end.code:
            os._exit(int(end.code))


def run_alone(order: dict[str, Any]) -> bool:
    """Without torchrun."""

    def with_files() -> None:
        folder = Path(order["logs"], "attempt_0", "0")
        folder.mkdir(parents=True)
        for number, name in ((1, "stdout.log"), (2, "stderr.log")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), number)
        work(order)

    process = multiprocessing.get_context("fork").Process(target=with_files)
    process.start()
    process.join()
    return process.exitcode == 0


def run(order: dict[str, Any]) -> bool:
    logs = DefaultLogsSpecs(order["logs"], redirects=Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=order["processes"],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=Path(order["logs"]).name,
        max_restarts=order.get("restarts", 0),
        start_method="fork",
        logs_specs=logs,
        monitor_interval=0.05,
    )
    try:
        elastic_launch(config, work)(order)
    except ChildFailedError:
        return False
    return True


def load_what_is_imported_late() -> None:
    """torch's optimizers import its compiler at their first step, which takes two seconds."""
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.AdamW([weight]).step()


if __name__ == "__main__":
    load_what_is_imported_late()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run(order) if order["processes"] else run_alone(order)), flush=True)
