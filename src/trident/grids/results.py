"""The results of a grid's finished cells: `result.json` in each cell's folder."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trident
from trident.grids.files import read_json
from trident.grids.grid import Grid
from trident.recipes.loading import flat_values, formatted, recipe_from
from trident.recipes.recipe import Recipe
from trident.settings import require

RESULT = "result.json"
# These do not change a run's result, so it may be resumed with other values, for example on a smaller machine.
FREE = ("training.tasks_per_chunk", "training.save_every", "training.log_every")


@dataclass(frozen=True)
class Measured:
    accuracy: float
    ci95: float
    protocol: dict[str, Any]
    execution: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A finished cell: a measurement, or the error that ended its training."""

    settings: dict[str, Any]  # those that vary in the grid
    recipe: dict[str, Any]
    steps: int  # trained
    best_step: int | None  # whose weights were measured: the best on the validation classes
    parameters: int
    evaluation: Measured | None
    protocol: str | None  # in words
    error: str | None
    device: str
    trident: str = trident.__version__
    hits: str | None = None  # queries that are right in each task, see measuring/hits.py


def read_results(grid: Grid, out: Path) -> dict[str, Result]:
    """The results of finished cells, by cell. Results with other settings are an error."""
    results: dict[str, Result] = {}
    for cell in grid.cells:
        folder = out / cell.name
        if (folder / RESULT).is_file():
            result = results[cell.name] = read_json(Result, folder / RESULT)
            check_same(recipe_from(result.recipe, str(folder / RESULT)), cell.recipe, folder)
            if grid.evaluation is None or result.evaluation is None:
                continue
            before = result.evaluation.protocol
            for key, value in asdict(grid.evaluation).items():
                require(before.get(key) == value, f"{folder} was measured with {key}={before.get(key)}, not {value}")
    return results


def check_same(before: Recipe, after: Recipe, folder: Path) -> None:
    """Raise an error if the folder holds a run with other settings."""
    old, new = flat_values(before), flat_values(after)
    for key in old | new:
        same = old.get(key) == new.get(key) or key in FREE
        change = f"{key} is {formatted(old.get(key))} there, not {formatted(new.get(key))}"
        require(same, f"{folder} holds another run: {change}; choose another folder, or delete this one")
