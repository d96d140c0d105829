"""The results of a grid's finished cells: `result.json` in each cell's folder, or all in one file, to be kept."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trident
from trident.errors import errors_in
from trident.grids.grid import Grid
from trident.measuring.record import Record
from trident.measuring.results_file import FILE_NAME, read_json, read_lines
from trident.recipes.loading import flat_values, formatted, recipe_from
from trident.recipes.plain_values import checked
from trident.recipes.recipe import Recipe
from trident.settings import require

RESULT = "result.json"
# These do not change a run's result, so it may be resumed with other values, for example on a smaller machine.
FREE = ("training.tasks_per_chunk", "training.save_every", "training.log_every")


@dataclass(frozen=True)
class Result:
    """A finished cell: a measurement, or the error that ended its training."""

    settings: dict[str, Any]  # those that vary in the grid
    recipe: dict[str, Any]
    steps: int  # trained
    best_step: int | None  # whose weights were measured: the best on the validation classes
    parameters: int
    evaluation: Record | None
    error: str | None
    device: str
    trident: str = trident.__version__

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"evaluation": self.evaluation and self.evaluation.to_json()}


def read_results(grid: Grid, out: Path) -> dict[str, Result]:
    """The results of finished cells, by cell. Results with other settings are an error."""
    results: dict[str, Result] = {}
    kept = read_lines(out / FILE_NAME)
    for cell in grid.cells:
        folder = out / cell.name
        path = folder / RESULT if (folder / RESULT).is_file() else out / FILE_NAME
        if path.name == RESULT or cell.name in kept:
            with errors_in(f"{path} is damaged"):
                values = read_json(path) if path.name == RESULT else kept[cell.name]
                result = results[cell.name] = checked(Result, _in_todays_form(values))
            check_same(recipe_from(result.recipe, str(path)), cell.recipe, folder)
            if grid.evaluation is None or result.evaluation is None:
                continue
            before = result.evaluation.protocol
            for key, value in asdict(grid.evaluation).items():
                require(before.get(key) == value, f"{folder} was measured with {key}={before.get(key)}, not {value}")
    return results


def _in_todays_form(values: Any) -> Any:
    """In older files, the protocol in words and the right answers stand beside the measurement."""
    if not isinstance(values, dict) or "protocol" not in values:
        return values
    rest = {key: value for key, value in values.items() if key not in ("protocol", "hits")}
    measured = rest.get("evaluation")
    if isinstance(measured, dict) and isinstance(protocol := measured.get("protocol"), dict):
        beside = {"described": values["protocol"], "hits": values.get("hits"), "trident": values.get("trident")}
        beside |= {"tasks": protocol.get("tasks"), "data": protocol.get("fingerprint")}
        rest["evaluation"] = measured | beside | {"queries": protocol.get("n_way", 0) * protocol.get("n_query", 0)}
    return rest


def check_same(before: Recipe, after: Recipe, folder: Path) -> None:
    """Raise an error if the folder holds a run with other settings."""
    old, new = flat_values(before), flat_values(after)
    for key in old | new:
        same = old.get(key) == new.get(key) or key in FREE
        change = f"{key} is {formatted(old.get(key))} there, not {formatted(new.get(key))}"
        require(same, f"{folder} holds another run: {change}; choose another folder, or delete this one")
