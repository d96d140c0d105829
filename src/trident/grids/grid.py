"""A grid: cells, each with its own recipe, and the results of finished ones, in their folders or in one file."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import trident
from trident.errors import did_you_mean, errors_in
from trident.grids.files import GridFile, MeasuredOn, Paper, read_grid
from trident.measuring.record import FILE_NAME, Record, read_json, read_lines
from trident.recipes.loading import (
    flat_values,
    formatted,
    full_key,
    load_recipe,
    recipe_from,
    recipe_values,
    setting_of,
    with_overrides,
)
from trident.recipes.plain_values import checked
from trident.recipes.recipe import Recipe
from trident.settings import require

SEED = "training.seed"
Plan = list[tuple[str, dict[str, Any]]]  # cells: name, and settings by section.key


@dataclass(frozen=True)
class Cell:
    """One training run of a grid."""

    name: str  # also the name of its folder
    recipe: Recipe  # with all settings of the cell
    group: str = ""  # its name without the seed, in a grid with seeds


@dataclass(frozen=True)
class Grid:
    name: str
    summary: str
    labels: dict[str, str]  # of every setting that varies
    cells: list[Cell]
    evaluation: MeasuredOn | None  # None: train only
    paper: Paper

    @property
    def paper_figures(self) -> dict[str, list[float]]:
        """The paper's accuracy and interval, by cell."""
        return self.paper.accuracy.get(self.cells[0].recipe.name, {})

    def changed(self, cell: Cell) -> dict[str, Any]:
        """The settings in which a cell differs from the first one."""
        first = self.varied(self.cells[0])
        return {key: value for key, value in self.varied(cell).items() if value != first[key]}

    def varied(self, cell: Cell) -> dict[str, Any]:
        """A cell's value of every setting that varies."""
        return {key: setting_of(cell.recipe, key) for key in self.labels}


def load_grid(name: str, overrides: Sequence[str] = (), recipe: str | None = None, **evaluation: Any) -> Grid:
    """An included grid by name, or any by the path of its TOML file. Other arguments override the file."""
    file, path = read_grid(name)
    base = load_recipe(recipe) if recipe else None
    with errors_in(path):
        own = str(path.parent / file.recipe) if file.recipe.endswith(".toml") else file.recipe
        base = base or load_recipe(own)
        common = _by_full_key(base, file.settings)
        base = _changed(base, common, "settings")
        plan, labels = _crossed(base, file) if file.axes else _listed(base, file)
        if file.seeds:
            require(SEED not in {*common, *labels}, f"{SEED} is set, and the grid has seeds: omit one of them")
        both = [key for key in common if key in labels]
        require(not both, f"{', '.join(both)} is in [settings] and varies too: omit it there")
        _check_names([cell for cell, _ in plan], file.paper)
    base = with_overrides(base, overrides)
    for text in overrides:
        key = full_key(base, text.partition("=")[0].lstrip("-").replace("-", "_"))
        require(key != SEED or not file.seeds, f"'{text}': this grid has seeds = {file.seeds}")
        require(key not in labels, f"'{text}': this grid varies {key}, so it cannot be set for all cells")
    with errors_in(path):
        cells = []
        for name, settings in plan:
            if not file.seeds:
                cells.append(Cell(name, _changed(base, settings, f"cell {name}")))
            for seed in file.seeds:
                seeded = _changed(base, settings | {SEED: seed}, f"cell {name}")
                cells.append(Cell(f"{name}-seed-{seed}", seeded, name))
        for one, other in itertools.combinations(cells, 2):
            require(one.recipe != other.recipe, f"the cells {one.name} and {other.name} have the same settings")
    measured = replace(file.evaluation, **{key: value for key, value in evaluation.items() if value is not None})
    return Grid(path.stem, file.summary, labels, cells, measured, file.paper)


def _crossed(base: Recipe, file: GridFile) -> tuple[Plan, dict[str, str]]:
    """The cells of a cross product, and the labels of its settings."""
    keys = [full_key(base, key) for axis in file.axes for key in axis.keys]
    for key in keys:
        require(keys.count(key) == 1, f"{key} is varied twice: one axis for each setting")
    given = [label for axis in file.axes for label in axis.names]
    labels = {key: label or key.split(".")[1] for key, label in zip(keys, given, strict=True)}
    plan = []
    for parts in itertools.product(*(axis.points for axis in file.axes)):
        settings = dict(zip(keys, itertools.chain(*parts), strict=True))
        name = "-".join(f"{labels[key]}-{formatted(value)}" for key, value in settings.items())
        plan.append((re.sub(r"[^A-Za-z0-9._-]+", "-", name), settings))
    return plan, labels


def _listed(base: Recipe, file: GridFile) -> tuple[Plan, dict[str, str]]:
    """Cells that are listed one by one, and the labels of their settings."""
    plan = []
    for place, cell in enumerate(file.cells):
        require("name" in cell, f"cells[{place}] needs a name")
        settings = _by_full_key(base, {key: value for key, value in cell.items() if key != "name"})
        plan.append((checked(str, cell["name"], f"cells[{place}].name"), settings))
    return plan, {key: key.split(".")[1] for _, settings in plan for key in settings}


def _check_names(names: Sequence[str], paper: Paper) -> None:
    lower = [name.lower() for name in names]  # many file systems ignore case
    for name in names:
        fits = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}", name) and name not in ("table.md", "plot.svg")
        require(bool(fits), f"'{name}' cannot be a cell's name: use up to 120 letters, digits and . _ -")
        require(lower.count(name.lower()) == 1, f"two cells are called '{name}': every cell needs a name of its own")
    for cell, figures in itertools.chain(*(part.items() for part in paper.accuracy.values())):
        require(cell in names, f"paper.accuracy names the unknown cell '{cell}'{did_you_mean(cell, names)}")
        require(len(figures) == 2, f"paper.accuracy of {cell} is {figures}: it must be [accuracy, interval]")


def _by_full_key(base: Recipe, values: dict[str, Any]) -> dict[str, Any]:
    """`training.steps = 4`, `steps = 4` and a table [training] all become {"training.steps": 4}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {key: value}
    return {full_key(base, key): value for key, value in flat.items()}


def _changed(base: Recipe, settings: dict[str, Any], where: str) -> Recipe:
    values = recipe_values(base)
    for key, value in settings.items():
        section, name = key.split(".")
        values[section][name] = value
    return recipe_from(values, where)


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
        moved = {"described": values["protocol"], "hits": values.get("hits"), "trident": values.get("trident")}
        moved |= {"tasks": protocol.get("tasks"), "data": protocol.get("fingerprint")}
        rest["evaluation"] = measured | moved | {"queries": protocol.get("n_way", 0) * protocol.get("n_query", 0)}
    return rest


def check_same(before: Recipe, after: Recipe, folder: Path) -> None:
    """Raise an error if the folder holds a run with other settings."""
    old, new = flat_values(before), flat_values(after)
    for key in old | new:
        same = old.get(key) == new.get(key) or key in FREE
        change = f"{key} is {formatted(old.get(key))} there, not {formatted(new.get(key))}"
        require(same, f"{folder} holds another run: {change}; choose another folder, or delete this one")
