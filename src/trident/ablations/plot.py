"""A grid's results as a chart, with the paper's results if there are any."""

import textwrap
from typing import Any

from trident.ablations.grid import Grid
from trident.ablations.tables import Results, footnotes
from trident.recipes.loading import formatted
from trident.report.figures import COLOURS, MARKERS, new_figure, styled


@styled
def grid_chart(grid: Grid, results: Results) -> Any:
    """Accuracies with their intervals. If two settings vary, the first gives the lines, the second the x axis."""
    several = bool(grid.cells[0].group)  # seeds
    first, second = grid.labels.values() if len(grid.labels) == 2 and not several else ("", "")
    places: dict[str, int] = {}  # on the x axis, by their label
    lines: dict[str, list[tuple[int, float, float]]] = {}  # place, accuracy and interval of the points, by line
    for cell in grid.cells:
        row, column = map(formatted, grid.varied(cell).values()) if first else ("", cell.group or cell.name)
        if several:
            row = f"seed {cell.recipe.training.seed}"
        place, line = places.setdefault(column, len(places)), f"{first} {row}".strip() or "accuracy"
        ours, paper = lines.setdefault(line, []), lines.setdefault(f"{line}, paper", [])
        if cell.name in results and (found := results[cell.name].evaluation):
            ours.append((place, found.accuracy, found.ci95))
        if (cell.group or cell.name) in grid.paper_figures:
            accuracy, interval = grid.paper_figures[cell.group or cell.name]
            paper.append((place, accuracy, interval))
    figure, axes = new_figure(8, 5.5)
    for number, (label, points) in enumerate(lines.items()):
        row_number, of_paper = divmod(number, 2)
        if points:
            x, y, intervals = zip(*points, strict=True)
            shift = 0.08 * (row_number - len(lines) / 4 + 0.5)  # so that intervals do not hide each other
            style: dict[str, Any] = {
                "color": COLOURS[row_number % len(COLOURS)],
                "marker": MARKERS[row_number % len(MARKERS)],
            }
            style |= {"mfc": "none", "alpha": 0.6, "linestyle": "--"} if of_paper else {}
            style |= {} if first else {"linestyle": "none"}
            axes.errorbar([place + shift for place in x], y, intervals, label=label, capsize=3, **style)
    axes.set_xticks(list(places.values()), list(places), **({} if first else {"rotation": 30, "ha": "right"}))
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel(second)
    axes.set_ylabel("accuracy, %")
    axes.set_title(textwrap.fill(grid.summary, 80), fontsize=10)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside right upper", fontsize=8)
    notes = "\n".join(textwrap.fill(note, 130) for note in footnotes(grid, results))
    figure.supxlabel(notes, fontsize=7, x=0.01, ha="left")
    return figure
