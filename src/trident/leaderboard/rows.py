"""What the leaderboard measures: rows, one for each method, on boards. Showing tables does not import torch."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trident.errors import TridentError, did_you_mean, errors_in
from trident.recipes.files import read_toml
from trident.recipes.plain_values import checked
from trident.settings import EpisodeSpec, Protocol

if TYPE_CHECKING:
    from trident.methods.base import Method
    from trident.recipes.recipe import Recipe

CONDITIONS = {  # by name: what differs from balanced piles
    "balanced": Protocol(),
    "dirichlet": Protocol(balance="dirichlet"),
    "alone": Protocol(queries_at_once="one"),
}
FEWER_TASKS_ALONE = 5  # classifying each query alone costs as much as a task, so a fifth of the tasks are measured


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    data: str  # which store it needs: mini, cub or glyphs
    trained_on: str  # the beginning of the names of recipes and weights
    episode: EpisodeSpec
    conditions: tuple[str, ...]
    classifier: str  # weights of a classifier of all training classes, for methods on frozen features

    @property
    def shape(self) -> str:
        """The part of the names of recipes and weights that tells ways and shots, for example -5w1s."""
        return f"-{self.episode.n_way}w{self.episode.n_shot}s" if self.trained_on == "mini" else ""


def _mini(data: str, title: str, shot: int, queries: int, *conditions: str) -> Board:
    name = f"{data}-{shot}-shot" + ("" if queries == 15 else f"-{queries}-queries")
    plural = "s" if shot > 1 else ""
    return Board(
        name,
        f"{title}, 5 ways, {shot} shot{plural}, {queries} queries per class",
        data,
        "mini",
        EpisodeSpec(5, shot, queries),
        ("balanced", *conditions),
        "mini-simpleshot",
    )


BOARDS = {
    board.name: board
    for board in [
        *(_mini("mini", "miniImageNet", shot, 15, "dirichlet", "alone") for shot in (1, 5)),
        *(_mini("mini", "miniImageNet", shot, 10) for shot in (1, 5)),
        *(_mini("cub", "miniImageNet to CUB", shot, 15, "dirichlet") for shot in (1, 5)),
        Board(
            "glyphs",
            "letters of unseen scripts, 5 ways, 1 shot, 5 queries per class",
            "glyphs",
            "glyphs",
            EpisodeSpec(5, 1, 5),
            ("balanced", "dirichlet", "alone"),
            "glyphs-simpleshot",
        ),
    ]
}


def board_called(name: str) -> Board:
    if name not in BOARDS:
        raise TridentError(f"no board is called '{name}'{did_you_mean(name, BOARDS)}")
    return BOARDS[name]


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


@cache
def rows() -> dict[str, Row]:
    with errors_in(FILE):
        return {row.name: row for row in checked(list[Row], read_toml(FILE)["row"], "row")}


def row_called(name: str) -> Row:
    if name not in rows():
        raise TridentError(f"the leaderboard has no row '{name}': there are {', '.join(rows())}")
    return rows()[name]


@cache
def _recipe(name: str) -> "Recipe":
    from trident.recipes.loading import load_recipe

    return load_recipe(name)
