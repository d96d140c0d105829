"""Cells of a grid as tasks of a Ray cluster, whose nodes share the folder. A lost one goes on from its last save."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trident.allocator import keep_freed_memory
from trident.data.store import ImageStore
from trident.errors import TridentError
from trident.grids.grid import Cell, Grid
from trident.grids.running import GridRun
from trident.ray_cluster import connected, short_message

_TRIES = 5  # how often a cell may be begun again, so that one that kills its node does not go on forever
_SAVING_SECONDS = 30  # for the tasks to save, when the command is stopped

SILENT = SimpleNamespace(on_step=lambda *_: None, on_validation=lambda *_: None)  # nobody watches a node
Opener = Callable[[str], ImageStore]  # from the store's name to the store, on any node
Outcome = tuple[list[str], int | None, str]  # lines to print, the step of an interruption, a mistake of the user's


def run_on_cluster(run: GridRun, cluster: str, open_data: Opener) -> str | None:
    """Train and measure the open cells. Returns where it was interrupted, if so."""
    run.check()
    for cell in run.grid.cells:
        if run.finished(cell):
            run.say(f"{run.title(cell)}: finished before")
    cells = [cell for cell in run.grid.cells if not run.finished(cell)]
    if not cells:
        return None
    for cell in cells:
        (run.out / cell.name).mkdir(parents=True, exist_ok=True)  # nodes that cannot see it do not share the folder
    with connected(cluster, run.say) as ray, run.counting_bar("training cells") as progress:
        gpus = 1 if run.device.startswith("cuda") else 0
        if gpus and not ray.cluster_resources().get("GPU"):
            raise TridentError("the Ray cluster has no GPUs: give --device cpu, or other nodes")
        options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": _TRIES, "scheduling_strategy": "SPREAD"}
        remote = ray.remote(**options)(_cell_on_node)
        shared = ray.put((run.grid, run.data, str(run.out.absolute()), run.device))  # sent once, not with every cell
        tasks: dict[Any, Cell] = {}  # that are waiting or running
        begun_again: Counter[str] = Counter()

        def start(cell: Cell) -> None:
            tasks[remote.remote(shared, open_data, run.grid.cells.index(cell))] = cell

        try:
            for cell in cells:
                start(cell)
            while tasks:
                progress(len(cells) - len(tasks), len(cells))
                (task, *_), _ = ray.wait(list(tasks), num_returns=1)
                lines, step, mistake = ray.get(task)
                cell = tasks.pop(task)
                for line in lines:
                    run.say(line)
                if mistake:
                    raise TridentError(mistake)
                if step is not None:  # it was interrupted, as its node shut down
                    begun_again[cell.name] += 1
                    if begun_again[cell.name] > _TRIES:
                        times = f"cell {cell.name} was interrupted {_TRIES + 1} times"
                        raise TridentError(f"{times}: look at the cluster's nodes")
                    start(cell)
            progress(len(cells), len(cells))
        except KeyboardInterrupt:
            for task in tasks:
                ray.cancel(task)
            ray.wait(list(tasks), num_returns=len(tasks), timeout=_SAVING_SECONDS)
            first, *others = [cell.name for cell in tasks.values()]
            return first + (f" and {len(others)} others" if others else "")
        except ray.exceptions.RayError as error:
            raise TridentError(f"the Ray cluster failed: {short_message(error)}") from error
    return None


def _cell_on_node(shared: tuple[Grid, str, str, str], open_data: Opener, number: int) -> Outcome:
    """On a node of the cluster. Mistakes of the user come back as a line, which Ray would bury in a traceback."""
    keep_freed_memory()
    grid, data, out, device = shared
    lines: list[str] = []
    cell = grid.cells[number]
    if not (Path(out) / cell.name).is_dir():
        return [], None, f"a node of the cluster cannot see {out}: it must be on a file system that all nodes share"
    try:
        run = GridRun(
            grid, open_data(data), data, Path(out), device, lines.append,
            lambda *_: nullcontext(SILENT), lambda _: nullcontext(lambda *_: None),
        )  # fmt: skip
        # A node that is given up for lost may still be at work for a moment, and then it has the lock.
        return lines, run.run_cell(cell, wait=True), ""
    except TridentError as error:
        return lines, None, f"cell {cell.name}, on a node of the cluster: {error}"
