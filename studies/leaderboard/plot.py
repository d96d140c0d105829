"""What unequal class counts do to each transductive method, in one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trident.leaderboard.results import FOLDER, Line, lines_of
from trident.leaderboard.rows import BOARDS
from trident.report.figures import COLOURS, new_figure, styled


def plotted_boards(folder: Path = FOLDER) -> list[list[Line]]:
    """The lines of each board on miniImageNet that has both balanced and unequal class counts."""
    boards = [board for board in BOARDS.values() if board.data == "mini" and "dirichlet" in board.conditions]
    return [lines for lines in (lines_of(board, folder) for board in boards) if lines]


@styled()
def unequal_counts(boards: Sequence[Sequence[Line]]) -> Any:
    """One panel for each board: accuracy with balanced classes (filled) and with Dirichlet(2) counts (open)."""
    shown = [[line for line in lines if line.together and "dirichlet" in line.measured] for lines in boards]
    height = 1.2 + 0.22 * max(map(len, shown))
    figure, axes = new_figure(10, height, 1, len(shown), squeeze=False)
    for axis, lines in zip(axes[0], shown, strict=True):
        lines = sorted(lines, key=lambda line: line.measured["dirichlet"].accuracy)
        for place, line in enumerate(lines):
            before, after = line.balanced.accuracy, line.measured["dirichlet"].accuracy
            colour = COLOURS[0] if after >= before - 1 else COLOURS[1]
            axis.plot([before, after], [place, place], color=colour, linewidth=1.2)
            axis.plot(before, place, "o", color=colour, markersize=5)
            axis.plot(after, place, "o", color=colour, markersize=5, markerfacecolor="none")
        axis.set_yticks(range(len(lines)), [line.row.name for line in lines])
        axis.set_xlabel("accuracy, %: filled balanced, open Dirichlet(2)")
        if lines:
            axis.set_title(lines[0].board.title, fontsize=10)
    return figure
