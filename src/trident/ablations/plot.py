"""A grid's results as a picture, beside the paper's figures where it has any."""

import textwrap
from collections.abc import Sequence
from typing import Any

from trident.ablations import Cell, Grid, shown
from trident.ablations.tables import Results, footnotes, matrix_of
from trident.report.figures import COLOURS, MARKERS, new_figure, styled


@styled
def grid_chart(grid: Grid, results: Results) -> Any:
    """Accuracies with their intervals and how they were obtained: a line for each row of a matrix, else points."""
    matrix = matrix_of(grid)
    figure, axes = new_figure(8, 5.5)
    if matrix is None:
        _draw(axes, grid, grid.cells, results, "", 0, 0.0)
        axes.set_xticks(range(len(grid.cells)), [cell.name for cell in grid.cells], rotation=30, ha="right")
    else:
        for i, (value, row) in enumerate(matrix.cells.items()):
            label = f"{grid.labels[matrix.row_setting]} {shown(value)}"
            shift = 0.08 * (i - (len(matrix.cells) - 1) / 2)  # so that intervals do not hide each other
            _draw(axes, grid, list(row.values()), results, label, i, shift)
        columns = list(next(iter(matrix.cells.values())))
        axes.set_xticks(range(len(columns)), [shown(column) for column in columns])
        axes.set_xlabel(grid.labels[matrix.column_setting])
    axes.set_xlim(-0.5, len(axes.get_xticks()) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("accuracy, %")
    axes.set_title(textwrap.fill(grid.summary, 80), fontsize=10)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside right upper", fontsize=8)
    notes = "\n".join(textwrap.fill(note, 130) for note in footnotes(grid, results, "hollow:"))
    figure.supxlabel(notes, fontsize=7, x=0.01, ha="left")
    return figure


def _draw(axes: Any, grid: Grid, cells: Sequence[Cell], results: Results, label: str, place: int, shift: float) -> None:
    """One series of cells, and the paper's figures for them in the same colour, hollow and dashed.

    A series without a label is none: its points stand apart.
    """
    ours: list[tuple[float, float, float]] = []
    paper: list[tuple[float, float, float]] = []
    for column, cell in enumerate(cells):
        result = results.get(cell.name)
        if result is not None and result.evaluation is not None:
            ours.append((column + shift, result.evaluation["accuracy"], result.evaluation["ci95"]))
        if grid.paper and cell.name in grid.paper.accuracy:
            paper.append((column + shift, *grid.paper.accuracy[cell.name]))
    style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "capsize": 3}
    if ours:
        x, y, interval = zip(*ours, strict=True)
        axes.errorbar(x, y, interval, label=label or "accuracy", linestyle="-" if label else "none", **style)
    if paper:
        x, y, interval = zip(*paper, strict=True)
        hollow = {"mfc": "none", "alpha": 0.6, "linestyle": "--" if label else "none"}
        axes.errorbar(x, y, interval, label=f"{label}, paper" if label else "paper", **style, **hollow)
