"""The lines of a board's table, from the kept results. Text, document and page all show these."""

from dataclasses import dataclass
from pathlib import Path

from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.frozen import FrozenBackbone
from trident.leaderboard.boards import BOARDS, Board
from trident.leaderboard.results import FOLDER, Measured, difference, read
from trident.leaderboard.rows import Row, rows
from trident.learning.stages import PREFIX as STAGE
from trident.recipes.files import recipe_names

REFERENCE = "simpleshot"  # differences are to this row: nearest class means on the features that most rows share


@dataclass(frozen=True)
class Line:
    row: Row
    board: Board
    measured: dict[str, Measured]  # by condition
    against: tuple[float, float] | None  # points above the reference on the same balanced tasks, and the interval

    @property
    def balanced(self) -> Measured:
        return self.measured["balanced"]

    @property
    def published(self) -> str:
        """The published figure with what it was measured on; empty if there is none."""
        figure = None if self.board.data != "mini" else self.row.published_at(self.board.episode.n_shot)
        if figure is None:
            return ""
        interval = "" if figure.ci95 is None else f" ± {figure.ci95:g}"
        return f"{figure.accuracy:g}{interval} ({figure.network}; {figure.protocol}; {figure.source})"

    @property
    def together(self) -> bool:
        """Whether it classifies queries together."""
        return self.row.method_on(self.board).classifies_together or self.row.batch_norm == "transductive"

    @property
    def network(self) -> str:
        """What its network was before training, and what differs from most others."""
        recipe = self.row.recipe_on(self.board)
        if isinstance(recipe.backbone, FrozenBackbone):
            return "frozen"
        start = recipe.training.start_from
        own = start is None or start.startswith(STAGE)  # an earlier stage of the same training is its own
        told = ["own" if own else f"own, from {start}"]
        if isinstance(recipe.backbone, Conv4Backbone) and recipe.backbone.activation == "leaky_relu":
            told.append("LeakyReLU")
        if self.row.batch_norm == "transductive":
            told.append("batch norm of the task's images")
        return ", ".join(told)


def lines_of(board: Board, folder: Path = FOLDER, reference: str = REFERENCE) -> list[Line]:
    """The measured rows of a board, best first."""
    results = {name: read(name, folder).get(board.name, {}) for name in rows()}
    beside = results.get(reference, {}).get("balanced")
    found = []
    for name, row in rows().items():
        measured = results[name]
        if "balanced" not in measured:
            continue
        against = None
        if beside is not None and name != reference:
            against = difference(measured["balanced"], beside, board.episode.n_counted)
        found.append(Line(row, board, measured, against))
    return sorted(found, key=lambda line: -line.balanced.accuracy)


def plotted_boards(folder: Path = FOLDER) -> list[list[Line]]:
    """The lines of each board on miniImageNet that has both balanced and unequal class counts."""
    boards = [board for board in BOARDS.values() if board.data == "mini" and "dirichlet" in board.conditions]
    return [lines for lines in (lines_of(board, folder) for board in boards) if lines]


def missing(board: Board, folder: Path = FOLDER) -> list[str]:
    """Rows that have no result on this board, but could have one."""
    return [
        name for name, row in rows().items() if board.name not in read(name, folder) and _can_be_measured(row, board)
    ]


def tasks_by_condition(lines: list[Line]) -> dict[str, str]:
    """How many tasks were measured, for people. Not every row has all conditions, or as many tasks as the others."""
    counts: dict[str, set[int]] = {}
    for line in lines:
        for name, measured in line.measured.items():
            counts.setdefault(name, set()).add(measured.tasks)
    return {name: " to ".join(f"{n:,}" for n in sorted({min(found), max(found)})) for name, found in counts.items()}


def _can_be_measured(row: Row, board: Board) -> bool:
    """Whether a recipe trains weights for the board, and they can classify as many queries."""
    if not row.recipe and row.weights_on(board) not in recipe_names():
        return False
    trained = row.recipe_on(board).episode
    return row.method_on(board).any_queries or trained.n_queries == board.episode.n_queries


def figure(measured: Measured | None) -> str:
    return "" if measured is None else f"{measured.accuracy:.2f} ± {measured.ci95:.2f}"


def points(against: tuple[float, float] | None) -> str:
    return "" if against is None else f"{against[0]:+.2f} ± {against[1]:.2f}"
