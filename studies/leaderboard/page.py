"""The leaderboard as one HTML page, sortable, without network access."""

from pathlib import Path

from studies.leaderboard.document import ABSENT, HEADINGS, TITLES, network_of
from studies.leaderboard.plot import plotted_boards, unequal_counts
from trident.leaderboard.results import FOLDER, REFERENCE, lines_of, missing, tasks_by_condition
from trident.leaderboard.rows import BOARDS
from trident.report.figures import to_svg
from trident.report.page import render


def page(folder: Path = FOLDER) -> str:
    boards = [(board, lines_of(board, folder), missing(board, folder)) for board in BOARDS.values()]
    boards = [entry for entry in boards if entry[1]]
    plotted = plotted_boards(folder)
    return render(
        "page.html",
        Path(__file__).parent,
        boards=boards,
        titles=TITLES,
        headings=HEADINGS,
        reference=REFERENCE,
        absent=ABSENT,
        network_of=network_of,
        tasks_by_condition=tasks_by_condition,
        plot=to_svg(unequal_counts(plotted), "unequal") if plotted else None,
    )
