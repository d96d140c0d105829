"""The kept results: one file, with a line for each row on each board."""

from pathlib import Path
from typing import Any

from trident.errors import errors_in
from trident.leaderboard.boards import BOARDS
from trident.measuring.record import Record, in_todays_form
from trident.measuring.results_file import FILE_NAME, change_line, read_json, read_lines
from trident.recipes.plain_values import checked

FOLDER = Path(__file__).parent

Results = dict[str, Record]  # of one row on one board, by condition


def read(board: str, folder: Path = FOLDER) -> dict[str, Results]:
    """The results on a board, by row. Older folders have a file for each row instead."""
    own = {name.partition(" on ")[::2]: line.get("conditions") for name, line in read_lines(folder / FILE_NAME).items()}
    for path in folder.glob("*.json"):
        of_boards = checked(dict[str, dict[str, Any]], read_json(path))
        own = {(path.stem, name): of_board for name, of_board in of_boards.items()} | own
    found, queries = {}, BOARDS[board].episode.n_counted
    for (row, on), conditions in own.items():
        if on == board:
            with errors_in(f"{folder}: the results of {row} on {board} are damaged"):
                values = {
                    name: in_todays_form(one, queries=queries)
                    for name, one in checked(dict[str, Any], conditions).items()
                }
                found[row] = checked(Results, values)
    return found


def add(row: str, board: str, found: Results, folder: Path) -> None:
    """Keep what was measured of a row on one board."""
    conditions = {condition: record.to_json() for condition, record in found.items()}
    change_line(folder / FILE_NAME, f"{row} on {board}", lambda _: {"conditions": conditions})
