"""The cells of a grid as tasks of a Ray cluster. The nodes share the grid's folder and the data.

A cell whose node is lost is begun again on another node, from its last save, and ends with the same result.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from trident.allocator import keep_freed_memory
from trident.data.store import ImageStore
from trident.errors import TridentError
from trident.grids.grid import Cell, Grid
from trident.grids.running import GridRun
from trident.ray_cluster import connected, short_message

_TRIES = 5  # how often a cell may be begun again, so that one that kills its node does not go on forever
_SAVING_SECONDS = 30  # for the tasks to save, when the command is stopped

Opener = Callable[[str], ImageStore]  # from the store's name to the store, on any node
Told = tuple[list[str], int | None, str]  # what a cell said, the step of an interruption, a mistake of the user's


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
        waiting = _Tasks(ray, run, open_data)
        for cell in cells:
            waiting.start(cell)
        try:
            for done in range(len(cells)):
                progress(done, len(cells))
                waiting.finish_one()
            progress(len(cells), len(cells))
        except KeyboardInterrupt:
            return waiting.stop()
        except ray.exceptions.RayError as error:
            raise TridentError(f"the Ray cluster failed: {short_message(error)}") from error
    return None


class _Tasks:
    """The cells that are being trained."""

    def __init__(self, ray: ModuleType, run: GridRun, open_data: Opener):
        gpus = 1 if run.device.startswith("cuda") else 0
        if gpus and not ray.cluster_resources().get("GPU"):
            raise TridentError("the Ray cluster has no GPUs: give --device cpu, or other nodes")
        options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": _TRIES, "scheduling_strategy": "SPREAD"}
        self._ray, self._run = ray, run
        self._remote = ray.remote(**options)(_cell_on_node)
        # Sent once, and not with every cell.
        self._arguments = ray.put((run.grid, run.data, str(run.out.absolute()), run.device)), open_data
        self._cells: dict[Any, Cell] = {}
        self._begun_again: dict[str, int] = {}

    def start(self, cell: Cell) -> None:
        task = self._remote.remote(*self._arguments, self._run.grid.cells.index(cell))
        self._cells[task] = cell

    def finish_one(self) -> None:
        """Wait for the next cell that ends. One that was interrupted, as its node shut down, is started again."""
        while True:
            (task, *_), _ = self._ray.wait(list(self._cells), num_returns=1)
            said, step, mistake = self._ray.get(task)
            cell = self._cells.pop(task)
            for line in said:
                self._run.say(line)
            if mistake:
                raise TridentError(mistake)
            if step is None:
                return
            self._begun_again[cell.name] = self._begun_again.get(cell.name, 0) + 1
            if self._begun_again[cell.name] > _TRIES:
                raise TridentError(f"cell {cell.name} was interrupted {_TRIES + 1} times: look at the cluster's nodes")
            self.start(cell)

    def stop(self) -> str:
        """Let all cells save what they have, and say which they are."""
        for task in self._cells:
            self._ray.cancel(task)
        self._ray.wait(list(self._cells), num_returns=len(self._cells), timeout=_SAVING_SECONDS)
        names = [cell.name for cell in self._cells.values()]
        return names[0] + (f" and {len(names) - 1} others" if len(names) > 1 else "")


class _Silent:
    """Watches training on a node, where nobody is watching."""

    def on_step(self, step: int, values: dict[str, Any]) -> None: ...

    def on_validation(self, step: int, validated: Any, best: bool) -> None: ...


def _cell_on_node(shared: tuple[Grid, str, str, str], open_data: Opener, number: int) -> Told:
    """On a node of the cluster. Mistakes of the user come back as a line, which Ray would bury in a traceback."""
    keep_freed_memory()
    grid, data, out, device = shared
    said: list[str] = []
    cell = grid.cells[number]
    if not (Path(out) / cell.name).is_dir():
        return [], None, f"a node of the cluster cannot see {out}: it must be on a file system that all nodes share"
    try:
        run = GridRun(
            grid, open_data(data), data, Path(out), device, said.append,
            lambda *_: nullcontext(_Silent()), lambda _: nullcontext(lambda *_: None),
        )  # fmt: skip
        # A node that is given up for lost may still be at work for a moment, and then it has the lock.
        return said, run.run_cell(cell, wait=True), ""
    except TridentError as error:
        return said, None, f"cell {cell.name}, on a node of the cluster: {error}"
