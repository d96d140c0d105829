"""Reads and checks grid files. Nothing here imports torch, so that listing grids is fast."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trident.errors import did_you_mean, errors_in
from trident.recipes.files import read_toml
from trident.recipes.plain_values import checked
from trident.settings import require, require_at_least

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class MeasuredOn:
    """The tasks that trained cells are measured on. The validation tasks are not those that chose the best weights."""

    split: str = "val"  # settings are chosen on validation classes
    tasks: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.split in ("train", "val", "test"), f"evaluation.split is '{self.split}', not train, val or test")
        require_at_least(self, "evaluation", 2, "tasks")
        require_at_least(self, "evaluation", 0, "seed")


@dataclass(frozen=True)
class Axis:
    """A setting and its values; or several settings that vary together, with a list for each value."""

    values: list[Any]
    setting: str = ""
    label: str = ""
    settings: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(bool(self.setting) != bool(self.settings), "an axis needs either 'setting' or 'settings'")
        fits = all(isinstance(entry, list) and len(entry) == len(self.keys) for entry in [*self.points, self.names])
        require(fits, f"an axis of several settings needs a list for each value: one entry for each of {self.keys}")

    @property
    def keys(self) -> list[str]:
        return self.settings or [self.setting]

    @property
    def points(self) -> list[list[Any]]:
        return self.values if self.settings else [[value] for value in self.values]

    @property
    def names(self) -> list[str]:
        return self.labels or [self.label] * len(self.keys)


@dataclass(frozen=True)
class Paper:
    """A paper's results for the same cells."""

    table: str = ""  # which table of it
    note: str = ""  # how its figures were obtained
    accuracy: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by recipe and cell: [percent, ±]

    def __post_init__(self) -> None:
        complete = bool(self.table and self.note) or not self.accuracy
        require(complete, "[paper] needs 'table' and 'note': where its figures stand, and how they were obtained")


@dataclass(frozen=True)
class GridFile:
    summary: str
    recipe: str  # a name, or a path relative to the grid's file
    settings: dict[str, Any] = field(default_factory=dict)  # the same in every cell
    evaluation: MeasuredOn = MeasuredOn()
    axes: list[Axis] = field(default_factory=list)  # to be crossed
    cells: list[dict[str, Any]] = field(default_factory=list)  # each with a name and its settings
    seeds: list[int] = field(default_factory=list)  # every cell is trained once with each of these
    paper: Paper = Paper()

    def __post_init__(self) -> None:
        require(len(set(self.seeds)) == len(self.seeds), f"seeds = {self.seeds} has one of them twice")
        require(not (self.axes and self.cells), "a grid has either [[axes]] or [[cells]], not both")
        require(self.n_cells > 0, "the grid is empty: it needs [[axes]] with values, or [[cells]]")

    @property
    def n_cells(self) -> int:
        cells = math.prod(len(axis.values) for axis in self.axes) if self.axes else len(self.cells)
        return cells * max(1, len(self.seeds))


def grid_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_grid(name: str) -> tuple[GridFile, Path]:
    """An included grid by name, or any by the path of its TOML file."""
    own = name.endswith(".toml")
    path = Path(name) if own else FOLDER / f"{name}.toml"
    require(path.is_file() or not own, f"no grid file at {path}")
    require(path.is_file(), f"no grid is called '{name}', and it is no TOML file{did_you_mean(name, grid_names())}")
    values = read_toml(path)
    with errors_in(path):
        return checked(GridFile, values), path
