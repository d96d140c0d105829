"""Training and measuring the cells of a grid, in a folder that several processes may share.

Each cell has a folder in it: an ordinary run, and `result.json` once the cell is finished. A cell is worked on under a
lock that ends with the process, however that ends, so what was interrupted is there for the next process to resume.
"""

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import trident
from trident.ablations import Cell, Grid, Measurement
from trident.ablations.records import RESULT, Result, changed_setting, claim_folder, locked, make_folder, write_json
from trident.data.store import ImageStore
from trident.errors import NotFiniteError, TridentError
from trident.learning.checkpoint import LAST, Checkpoint, load_checkpoint
from trident.learning.run_start import check_run, resume_run, start_run
from trident.learning.training import Observer, train
from trident.measuring.evaluate import Evaluation, Progress, evaluate_checkpoint
from trident.recipes import recipe_values
from trident.tasks.episodes import EpisodeSampler

_LOCK = "lock"


class Watcher(Protocol):
    """Whoever watches a grid, progress bars for instance."""

    def on_cell(self, number: int, cell: Cell, news: str) -> None: ...

    def training(self, step: int, steps: int) -> AbstractContextManager[Observer]: ...

    def evaluating(self) -> AbstractContextManager[Progress]: ...


@dataclass(frozen=True)
class Outcome:
    """How a process left a grid."""

    busy: tuple[str, ...] = ()  # cells that another process was working on
    stopped: tuple[str, int] | None = None  # the cell and step it was interrupted in


def check_grid(grid: Grid, store: ImageStore) -> None:
    """Find what would stop any cell before the first is trained."""
    for cell in grid.cells:
        try:
            EpisodeSampler(store, grid.evaluation.split, cell.recipe.episode, cell.recipe.protocol)
            check_run(cell.recipe, store)
        except TridentError as error:
            raise TridentError(f"cell {cell.name}: {error}") from error


def run_grid(
    grid: Grid,
    store: ImageStore,
    data: str,
    out: Path,
    device: str,
    watcher: Watcher,
    cells: Sequence[int] | None = None,
) -> Outcome:
    """Train and measure every cell that is not finished, or those among `cells`, given by their numbers from 1."""
    check_grid(grid, store)
    claim_folder(grid, store, data, out)
    busy: list[str] = []
    for number, cell in enumerate(grid.cells, 1):
        folder = out / cell.name
        if cells is not None and number not in cells:
            continue
        if (folder / RESULT).is_file():
            watcher.on_cell(number, cell, "finished before")
            continue
        make_folder(folder)
        with locked(folder / _LOCK) as mine:
            if not mine:
                watcher.on_cell(number, cell, "another process is working on it")
                busy.append(cell.name)
                continue
            if not (folder / RESULT).is_file():  # another process may have finished it a moment ago
                stopped = _run_cell(number, cell, grid.evaluation, store, data, folder, device, watcher)
                if stopped is not None:
                    return Outcome(tuple(busy), (cell.name, stopped))
            (folder / _LOCK).unlink(missing_ok=True)  # who gets hold of it even so will find the result
    return Outcome(tuple(busy))


def _run_cell(
    number: int,
    cell: Cell,
    measurement: Measurement,
    store: ImageStore,
    data: str,
    folder: Path,
    device: str,
    watcher: Watcher,
) -> int | None:
    """Train and measure one cell, and write its result. A step, if it was interrupted there."""
    start = _start(cell, store, data, folder, device)
    steps = cell.recipe.training.steps
    watcher.on_cell(number, cell, f"resuming after step {start.step}" if start.step else "training")
    evaluation, error, best_step, seconds = None, None, None, 0.0
    try:
        with watcher.training(start.step, steps) as observer:
            end = train(start, store, folder, device, observer)
        if end.step < steps or end.validated_step < steps:
            return end.step
        best = load_checkpoint(folder)
        best_step, began = best.step, time.perf_counter()
        evaluation = _measure(replace(best, recipe=cell.recipe), measurement, store, device, watcher)
        seconds = time.perf_counter() - began
        watcher.on_cell(number, cell, f"accuracy {evaluation.accuracy:.2f} ± {evaluation.ci95:.2f} %")
    except NotFiniteError as problem:
        # Numbers that blow up are this cell's own result. Anything else, a full disk for instance, is no result.
        error = str(problem)
        watcher.on_cell(number, cell, f"failed: {error}")
    last = load_checkpoint(folder / LAST)
    result = Result(
        cell.name,
        cell.settings,
        recipe_values(cell.recipe),
        last.step,
        best_step,
        sum(value.numel() for value in last.parameters.values()),
        {"training": _seconds_in_log(folder / "log.jsonl"), "evaluation": seconds},
        evaluation.to_json() if evaluation else None,
        evaluation.describe_protocol() if evaluation else None,
        error,
        device,
        trident.__version__,
    )
    write_json(folder / RESULT, asdict(result))
    return None


def _start(cell: Cell, store: ImageStore, data: str, folder: Path, device: str) -> Checkpoint:
    if not (folder / LAST).is_file():
        return start_run(cell.recipe, store, data, folder, device)
    start = resume_run(load_checkpoint(folder / LAST), store, folder)
    changed = changed_setting(start.recipe, cell.recipe)
    if changed is not None:
        raise TridentError(f"{folder} holds a run of something else: {changed}; delete it to train the cell anew")
    return replace(start, recipe=cell.recipe)


def _measure(
    best: Checkpoint, measurement: Measurement, store: ImageStore, device: str, watcher: Watcher
) -> Evaluation:
    with watcher.evaluating() as progress:
        return evaluate_checkpoint(
            best,
            store,
            split=measurement.split,
            tasks=measurement.tasks,
            seed=measurement.seed,
            device=device,
            tasks_per_chunk=best.recipe.training.tasks_per_chunk,
            progress=progress,
        )


def _seconds_in_log(log: Path) -> float:
    """Seconds spent on training steps, those before an interruption included."""
    total, before = 0.0, 0
    for line in log.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if entry["kind"] == "train":
            total += entry["seconds"] * (entry["step"] - before)  # a line holds the mean of its steps
            before = entry["step"]
    return total
