"""The kept results: one file, with a line for each row on each board. Text, document and page show them as `Line`s."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trident.errors import errors_in
from trident.leaderboard.rows import BOARDS, Board, Row, rows
from trident.measuring.record import (
    FILE_NAME,
    Record,
    change_line,
    difference,
    in_todays_form,
    plus_minus,
    read_json,
    read_lines,
)
from trident.recipes.files import recipe_names
from trident.recipes.plain_values import checked

FOLDER = Path(__file__).parent

Results = dict[str, Record]  # of one row on one board, by condition


def read(board: str, folder: Path = FOLDER) -> dict[str, Results]:
    """The results on a board, by row. Older folders have a file for each row instead."""
    own = {name.partition(" on ")[::2]: line.get("conditions") for name, line in read_lines(folder / FILE_NAME).items()}
    for path in folder.glob("*.json"):
        of_boards = checked(dict[str, dict[str, Any]], read_json(path))
        own = {(path.stem, name): of_board for name, of_board in of_boards.items()} | own
    results, queries = {}, BOARDS[board].episode.n_counted
    for (row, on), conditions in own.items():
        if on == board:
            with errors_in(f"{folder}: the results of {row} on {board} are damaged"):
                values = {
                    name: in_todays_form(one, queries=queries)
                    for name, one in checked(dict[str, Any], conditions).items()
                }
                results[row] = checked(Results, values)
    return results


def add(row: str, board: str, results: Results, folder: Path) -> None:
    """Keep what was measured of a row on one board."""
    conditions = {condition: record.to_json() for condition, record in results.items()}
    change_line(folder / FILE_NAME, f"{row} on {board}", lambda _: {"conditions": conditions})


REFERENCE = "simpleshot"  # differences are to this row: nearest class means on the features that most rows share


@dataclass(frozen=True)
class Line:
    row: Row
    board: Board
    measured: Results  # by condition
    against: tuple[float, float] | None  # points above the reference on the same balanced tasks, and the interval

    @property
    def balanced(self) -> Record:
        return self.measured["balanced"]

    @property
    def ece(self) -> str:
        return f"{self.balanced.calibration['validation'].ece:.4f}"

    @property
    def above(self) -> str:
        """Points above the reference; empty for the reference itself."""
        return "" if self.against is None else plus_minus(*self.against, sign="+")

    def figure(self, condition: str) -> str:
        return self.measured[condition].figure if condition in self.measured else ""

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
        return self.row.together or self.row.batch_norm == "transductive"


def lines_of(board: Board, folder: Path = FOLDER) -> list[Line]:
    """The measured rows of a board, best first."""
    results = read(board.name, folder)
    reference = results.get(REFERENCE, {}).get("balanced")
    lines = []
    for name, row in rows().items():
        measured = results.get(name, {})
        if "balanced" in measured:
            against = difference(measured["balanced"], reference) if reference and name != REFERENCE else None
            lines.append(Line(row, board, measured, against))
    return sorted(lines, key=lambda line: -line.balanced.accuracy)


def missing(board: Board, folder: Path = FOLDER) -> list[str]:
    """Rows that have no result on this board, but could have one."""
    measured = read(board.name, folder)
    return [name for name, row in rows().items() if name not in measured and _can_be_measured(row, board)]


def tasks_by_condition(lines: list[Line]) -> dict[str, str]:
    """How many tasks were measured, for people. Not every row has all conditions, or as many tasks as the others."""
    counts: dict[str, set[int]] = {}
    for line in lines:
        for name, measured in line.measured.items():
            counts.setdefault(name, set()).add(measured.tasks)
    return {name: " to ".join(f"{n:,}" for n in sorted({min(own), max(own)})) for name, own in counts.items()}


def _can_be_measured(row: Row, board: Board) -> bool:
    """Whether a recipe trains weights for the board, and they can classify as many queries."""
    if not row.recipe and row.weights_on(board) not in recipe_names():
        return False
    trained = row.recipe_on(board).episode
    return row.method_on(board).any_queries or trained.n_queries == board.episode.n_queries
