"""Grids: many training runs from one TOML file. A grid's name, or the path of a file of one's own, loads it.

A grid starts from a recipe and says what varies: either `axes`, whose cross product gives the cells, or a list of
`cells`. See the files in this folder for how one looks.
"""

import itertools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trident.ablations.checks import known_setting, listed, number, table, text
from trident.data.store import SPLITS
from trident.errors import TridentError
from trident.recipes import load_recipe, nearest, recipe_from, recipe_values, with_overrides
from trident.settings import Recipe

FOLDER = Path(__file__).parent
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}"  # of a cell: a folder's name on any system
_TAKEN = {"grid.json", "grid.lock", "table.md", "plot.svg"}  # by the grid's own files, beside the cells' folders


@dataclass(frozen=True)
class Measurement:
    """How every cell is measured once it is trained. Its validation tasks are not those that chose its best weights."""

    split: str = "val"  # settings are chosen on validation classes; the test classes have to be asked for
    tasks: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise TridentError(f"evaluation.split is {self.split!r}: it must be one of {', '.join(SPLITS)}")
        for name, least in (("tasks", 2), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise TridentError(f"evaluation.{name} is {value!r}: it must be a whole number, {least} or more")


@dataclass(frozen=True)
class PaperFigures:
    """What a paper reports for the same cells."""

    table: str  # which table of it
    note: str  # how its figures were obtained
    accuracy: dict[str, tuple[float, float]]  # by cell: percent, and what the paper puts after ±


@dataclass(frozen=True)
class Cell:
    """One training run of a grid."""

    name: str  # also its folder's
    settings: dict[str, Any]  # what it sets beyond the recipe that all cells share
    recipe: Recipe  # everything it is trained from


@dataclass(frozen=True)
class Grid:
    name: str
    summary: str
    labels: dict[str, str]  # of every setting that varies
    cells: tuple[Cell, ...]
    evaluation: Measurement
    paper: PaperFigures | None


def grid_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_grid(
    name: str,
    overrides: Sequence[str] = (),
    recipe: str | None = None,
    split: str | None = None,
    tasks: int | None = None,
) -> Grid:
    """A shipped grid by name, or one's own by the path of its TOML file; what else is given replaces what it says."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise TridentError(f"no grid file at {path}")
        raise TridentError(f"no grid is called '{name}'{nearest(name, grid_names())}")
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TridentError(f"{path} is not valid TOML: {error}") from error
    try:
        plan = _plan(values)
        base = load_recipe(_beside(path, plan.recipe)) if recipe is None else None
    except TridentError as error:
        raise TridentError(f"{path}: {error}") from None
    base = recipe_from(_changed(base or load_recipe(str(recipe)), plan.common), f"{path}, settings")
    _check_overrides(overrides, plan.labels)
    base = with_overrides(base, overrides)
    cells = tuple(_cell(base, name, settings, path) for name, settings in plan.cells)
    for one, other in itertools.combinations(cells, 2):
        if one.recipe == other.recipe:
            raise TridentError(f"{path}: the cells {one.name} and {other.name} have the same settings")
    evaluation = replace(plan.evaluation, split=split or plan.evaluation.split, tasks=tasks or plan.evaluation.tasks)
    figures = plan.figures.get(base.name)
    paper = PaperFigures(plan.paper["table"], plan.paper["note"], figures) if figures else None
    return Grid(path.stem, plan.summary, plan.labels, cells, evaluation, paper)


def grid_values(grid: Grid) -> dict[str, Any]:
    return asdict(grid)


def grid_from(values: dict[str, Any], source: str) -> Grid:
    """A grid from the plain values that `grid_values` gave."""
    try:
        cells = tuple(
            Cell(cell["name"], cell["settings"], recipe_from(cell["recipe"], source)) for cell in values["cells"]
        )
        paper = values["paper"]
        if paper is not None:
            accuracy = {cell: (float(value), float(interval)) for cell, (value, interval) in paper["accuracy"].items()}
            paper = PaperFigures(paper["table"], paper["note"], accuracy)
        evaluation = Measurement(**values["evaluation"])
        return Grid(values["name"], values["summary"], values["labels"], cells, evaluation, paper)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TridentError(f"{source} is damaged: {error!r}") from error


def setting_of(recipe: Recipe, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def shown(value: Any) -> str:
    """A setting's value as one writes it in a recipe or on the command line."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class _Plan:
    """A grid file, checked as far as that goes without its recipe."""

    summary: str
    recipe: str
    common: dict[str, Any]
    cells: list[tuple[str, dict[str, Any]]]
    labels: dict[str, str]
    evaluation: Measurement
    paper: dict[str, str]
    figures: dict[str, dict[str, tuple[float, float]]]  # by recipe and cell


def _plan(values: dict[str, Any]) -> _Plan:
    table(values, "", needed=("summary", "recipe"), known=("settings", "evaluation", "axes", "cells", "paper"))
    if ("axes" in values) == ("cells" in values):
        raise TridentError("a grid has either [[axes]] or [[cells]]" + (", not both" if "axes" in values else ""))
    cells, labels = _crossed(values["axes"]) if "axes" in values else _written_out(values["cells"])
    if not cells:
        raise TridentError("the grid is empty: it needs at least one cell")
    seen: set[str] = set()
    for name, _ in cells:
        if not re.fullmatch(_NAME, name) or name in _TAKEN:
            raise TridentError(
                f"'{name}' cannot be a cell's name, which is a folder's: letters, digits and . _ - will do, 120 at most"
            )
        if name.lower() in seen:  # many disks do not tell upper from lower case
            raise TridentError(f"two cells are called '{name}': every cell needs a name of its own")
        seen.add(name.lower())
    evaluation = table(values.get("evaluation", {}), "evaluation", known=("split", "tasks", "seed"))
    paper = table(
        values.get("paper", {"accuracy": {}, "table": "", "note": ""}), "paper", ("table", "note", "accuracy")
    )
    common = _flat(values.get("settings", {}), "settings")
    for key in common:
        if key in labels:
            raise TridentError(f"{key} is in [settings] and varies too: leave it away there")
    return _Plan(
        text(values["summary"], "summary"),
        text(values["recipe"], "recipe"),
        common,
        cells,
        labels,
        Measurement(**evaluation),
        {name: text(paper[name], f"paper.{name}") for name in ("table", "note")},
        _figures(paper["accuracy"], [name for name, _ in cells]),
    )


def _crossed(axes: Any) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, str]]:
    """The cells of a cross product. An axis is one setting, or several that vary together."""
    columns: list[list[dict[str, Any]]] = []
    given: dict[str, str | None] = {}  # labels, where there are any
    for i, axis in enumerate(listed(axes, "axes")):
        where = f"axes[{i}]"
        table(axis, where, needed=("values",), known=("setting", "settings", "label", "labels"))
        if ("setting" in axis) == ("settings" in axis):
            raise TridentError(f"{where} needs either 'setting', or 'settings' for several that vary together")
        several = "settings" in axis
        wrong = "label" if several else "labels"
        if wrong in axis:
            raise TridentError(f"{where} has {'several settings' if several else 'one setting'}: it takes no '{wrong}'")
        keys = listed(axis["settings"], f"{where}.settings") if several else [axis["setting"]]
        keys = [known_setting(key, where) for key in keys]
        points = listed(axis["values"], f"{where}.values")
        points = [listed(point, f"{where}.values") for point in points] if several else [[point] for point in points]
        labels = listed(axis["labels"], f"{where}.labels") if "labels" in axis else [axis.get("label")] * len(keys)
        odd = [entry for entry in (*points, labels) if len(entry) != len(keys)]
        if odd:
            raise TridentError(f"{where}: {odd[0]} should hold one entry for each of {', '.join(keys)}")
        for key, label in zip(keys, labels, strict=True):
            if key in given:
                raise TridentError(f"{key} is varied twice: one axis for each setting")
            given[key] = None if label is None else text(label, f"{where}.label")
        columns.append([dict(zip(keys, point, strict=True)) for point in points])
    named = {key: given[key] or short for key, short in zip(given, _short(list(given)), strict=True)}
    crossed = [{key: value for part in parts for key, value in part.items()} for parts in itertools.product(*columns)]
    return [(_named(settings, named), settings) for settings in crossed if settings], named


def _written_out(cells: Any) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, str]]:
    """Cells that are listed one by one, each with a name and its settings."""
    found: list[tuple[str, dict[str, Any]]] = []
    for i, cell in enumerate(listed(cells, "cells")):
        if not isinstance(cell, dict) or "name" not in cell:
            raise TridentError(f"cells[{i}] needs a name")
        rest = {key: value for key, value in cell.items() if key != "name"}
        found.append((text(cell["name"], f"cells[{i}].name"), _flat(rest, f"cells[{i}]")))
    keys = list(dict.fromkeys(key for _, settings in found for key in settings))
    return found, dict(zip(keys, _short(keys), strict=True))


def _flat(values: Any, where: str) -> dict[str, Any]:
    """`model.channels = 4` and `[settings.model]` both become {"model.channels": 4}."""
    flat: dict[str, Any] = {}
    for key, value in table(values, where).items():
        inner = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {key: value}
        flat |= {known_setting(name, where): entry for name, entry in inner.items()}
    return flat


def _figures(values: Any, cells: Sequence[str]) -> dict[str, dict[str, tuple[float, float]]]:
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    for recipe, entries in table(values, "paper.accuracy").items():
        where = f"paper.accuracy.{recipe}"
        figures[recipe] = {}
        for cell, pair in table(entries, where, known=cells).items():
            numbers = [number(entry, f"{where}.{cell}") for entry in listed(pair, f"{where}.{cell}")]
            if len(numbers) != 2:
                raise TridentError(f"{where}.{cell} is {pair}: it must be [accuracy, interval]")
            figures[recipe][cell] = (numbers[0], numbers[1])
    return figures


def _cell(base: Recipe, name: str, settings: dict[str, Any], path: Path) -> Cell:
    recipe = recipe_from(_changed(base, settings), f"{path}, cell {name}")
    return Cell(name, {key: setting_of(recipe, key) for key in settings}, recipe)


def _changed(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    values = recipe_values(recipe)
    for key, value in settings.items():
        section, name = key.split(".")
        values[section][name] = value
    return values


def _check_overrides(overrides: Sequence[str], varied: dict[str, str]) -> None:
    for text_ in overrides:
        key = text_.partition("=")[0].lstrip("-").replace("-", "_")
        if any(key in (known, known.split(".")[1]) for known in varied):
            raise TridentError(f"'{text_}': {key} is what this grid varies, so it cannot be set for all cells")


def _beside(path: Path, recipe: str) -> str:
    """A recipe's name as it is, a recipe's path relative to the grid's file."""
    return str(path.parent / recipe) if recipe.endswith(".toml") else recipe


def _short(keys: Sequence[str]) -> list[str]:
    """Settings without their sections, where that leaves no doubt."""
    names = [key.split(".")[1] for key in keys]
    return [name if names.count(name) == 1 else key for key, name in zip(keys, names, strict=True)]


def _named(settings: dict[str, Any], labels: dict[str, str]) -> str:
    joined = "-".join(f"{labels[key]}-{shown(value)}" for key, value in settings.items())
    return re.sub(r"[^A-Za-z0-9._-]+", "-", joined)
