"""Training and measuring the cells of a grid.

Each cell has a folder: an ordinary run, and `result.json` once the cell is finished. A process locks the cell it works
on, so that two commands never write the same run. The lock ends with the process, so the next process can resume an
interrupted cell. `on_cluster.py` spreads the cells over several machines.
"""

import fcntl
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trident.data.store import ImageStore
from trident.errors import NotFiniteError, errors_in
from trident.files import write_file
from trident.grids.grid import RESULT, Cell, Grid, Result, check_same, read_results
from trident.learning.checkpoint import LAST, Checkpoint, load_checkpoint
from trident.learning.run_start import check_run, check_same_data, start_run
from trident.learning.training import Observer, train
from trident.measuring.evaluate import evaluate, validate
from trident.nn.parameters import count
from trident.progress import Progress
from trident.recipes.loading import recipe_values
from trident.settings import require
from trident.tasks.episodes import EpisodeSampler


@dataclass(frozen=True)
class GridRun:
    """A grid, its data, and how to show progress."""

    grid: Grid
    store: ImageStore
    data: str  # how to find the store again
    out: Path
    device: str
    say: Callable[[str], None]
    training_bar: Callable[[int, int], AbstractContextManager[Observer]]  # takes the first step and the last
    counting_bar: Callable[[str], AbstractContextManager[Progress]]

    def check(self) -> None:
        """Check all cells before the first is trained."""
        require(self.out.is_dir() or not self.out.exists(), f"{self.out} is a file: --out needs a folder")
        for cell in self.grid.cells:
            with errors_in(f"cell {cell.name}"):
                if self.grid.evaluation is not None:
                    EpisodeSampler(self.store, self.grid.evaluation.split, cell.recipe.episode, cell.recipe.protocol)
                check_run(cell.recipe, self.store)
                self._begun(cell)
        read_results(self.grid, self.out)

    def run(self) -> str | None:
        """Train and measure the open cells that no other process works on. Returns where it was interrupted, if so."""
        self.check()
        for cell in self.grid.cells:
            step = self.run_cell(cell)
            if step is not None:
                return f"{cell.name} after step {step}"
        return None

    def title(self, cell: Cell) -> str:
        return f"cell {self.grid.cells.index(cell) + 1}/{len(self.grid.cells)} {cell.name}"

    def finished(self, cell: Cell) -> bool:
        return (self.out / cell.name / RESULT).is_file()

    def run_cell(self, cell: Cell, wait: bool = False) -> int | None:
        """Train and measure one cell, if it is open. Returns the step of an interruption, if any.

        If another process works on it, the cell is skipped; with `wait`, it is begun when that process has ended.
        """
        folder, title = self.out / cell.name, self.title(cell)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                self.say(f"{title}: skipped, another process is working on it")
                return None
            if self.finished(cell):
                self.say(f"{title}: finished before")
            else:
                step = self._train_and_measure(cell, folder, title)
                if step is not None:
                    return step
            (folder / "lock").unlink(missing_ok=True)  # other processes will find the result
        return None

    def _train_and_measure(self, cell: Cell, folder: Path, title: str) -> int | None:
        """Train and measure one cell, and write its result. Returns the step of an interruption, if any."""
        start = self._begun(cell) or start_run(cell.recipe, self.store, self.data, folder, self.device)
        steps, chunk = cell.recipe.training.steps, cell.recipe.training.tasks_per_chunk
        self.say(f"{title}: resuming after step {start.step}" if start.step else f"{title}: training")
        evaluation, best_step, error = None, None, None
        try:
            with self.training_bar(start.step, steps) as observer:
                end = train(start, self.store, folder, self.device, observer, validate)
            if end.step < steps or end.validated_step < steps:
                return end.step
            best = replace(load_checkpoint(folder), recipe=cell.recipe)
            best_step = best.step
            if self.grid.evaluation is None:
                self.say(f"{title}: trained")
            else:
                sample = asdict(self.grid.evaluation) | {"device": self.device, "tasks_per_chunk": chunk}
                with self.counting_bar("evaluating tasks") as progress:
                    evaluation = evaluate(best, self.store, progress=progress, **sample)
                self.say(f"{title}: accuracy {evaluation.accuracy:.2f} ± {evaluation.ci95:.2f} %")
        except NotFiniteError as problem:
            # Numbers that are not finite are a result of this cell. Other errors, such as a full disk, are not.
            error = str(problem).partition(". ")[0]  # what follows is advice for this folder
            self.say(f"{title}: failed: {error}")
        last = load_checkpoint(folder / LAST)
        result = Result(
            settings=self.grid.varied(cell),
            recipe=recipe_values(cell.recipe),
            steps=last.step,
            best_step=best_step,
            parameters=count(last.parameters),
            evaluation=evaluation.record() if evaluation else None,
            error=error,
            device=self.device,
        )
        write_file(folder / RESULT, json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n")
        return None

    def _begun(self, cell: Cell) -> Checkpoint | None:
        """The last checkpoint of a cell, if its training has begun."""
        folder = self.out / cell.name
        if not (folder / LAST).is_file():
            return None
        before = load_checkpoint(folder / LAST)
        check_same_data(before, self.store, folder)
        check_same(before.recipe, cell.recipe, folder)
        return replace(before, recipe=cell.recipe)
