"""The rows of the leaderboard, one for each method, as `rows.toml` lists them.

Nothing here imports torch before a recipe or a method is asked for, so that the tables are shown fast.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trident.errors import TridentError, errors_in
from trident.leaderboard.boards import Board
from trident.recipes.files import read_toml
from trident.recipes.plain_values import checked

if TYPE_CHECKING:
    from trident.methods.base import Method
    from trident.recipes.recipe import Recipe

FILE = Path(__file__).with_name("rows.toml")


@dataclass(frozen=True)
class Published:
    """A figure of somebody else. It was not measured by this package."""

    n_shot: int
    accuracy: float
    ci95: float | None = None
    network: str = "Conv4, 64 channels"
    protocol: str = "15 queries per class, balanced"
    source: str = ""


@dataclass(frozen=True)
class Row:
    """A method as it is measured: on frozen features if it has a recipe, else with weights of its own."""

    name: str  # of weights, and of the file with its results
    method: str
    title: str
    recipe: str = ""  # of a method on the features of a classifier of all training classes
    weights: str = "{data}{shape}-{name}"  # for example mini-5w1s-protonet
    views: bool = False  # whether the weights' own views of the images are used
    batch_norm: str = "running"  # statistics at test
    together: bool = False  # whether one query changes the answer to another, other than through batch norm
    settings: tuple[str, ...] = ()
    settings_by_shot: dict[str, list[str]] = field(default_factory=dict)
    assumes: str = ""  # what it takes for granted about a task
    published: tuple[Published, ...] = ()
    note: str = ""  # why ours is below the published figure, or what differs

    def weights_on(self, board: Board) -> str:
        """The name of its weights."""
        return self.weights.format(data=board.trained_on, shape=board.shape, name=self.name)

    def recipe_on(self, board: Board) -> "Recipe":
        """The recipe of its weights, or of the method on frozen features."""
        return _recipe(self.recipe or self.weights_on(board))

    def method_on(self, board: Board) -> "Method":
        """The method as it is measured."""
        from trident.methods.registry import method_class, method_name
        from trident.recipes.loading import with_overrides

        recipe = self.recipe_on(board)
        if method_name(recipe.method) != self.method:  # weights of another method, trained in the same way
            return cast("Method", method_class(self.method)())
        return with_overrides(recipe, self.settings_for(board.episode.n_shot)).method

    def settings_for(self, n_shot: int) -> list[str]:
        return [*self.settings, *self.settings_by_shot.get(str(n_shot), [])]

    def published_at(self, n_shot: int) -> Published | None:
        return next((figure for figure in self.published if figure.n_shot == n_shot), None)


@dataclass(frozen=True)
class Absent:
    """A system of the paper's tables that is not measured."""

    title: str
    why: str


@dataclass(frozen=True)
class Field:
    """Everything in `rows.toml`."""

    row: tuple[Row, ...]
    absent: tuple[Absent, ...]


@cache
def rows() -> dict[str, Row]:
    return {row.name: row for row in _field().row}


@cache
def absent() -> tuple[Absent, ...]:
    return _field().absent


def row_called(name: str) -> Row:
    if name not in rows():
        raise TridentError(f"the leaderboard has no row '{name}': there are {', '.join(rows())}")
    return rows()[name]


@cache
def _recipe(name: str) -> "Recipe":
    from trident.recipes.loading import load_recipe

    return load_recipe(name)


@cache
def _field() -> Field:
    with errors_in(FILE):
        found: Field = checked(Field, read_toml(FILE))
        return found
