"""A grid's results as a chart."""

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from trident.grids.grid import Grid
from trident.grids.tables import Results, differences_of, footnotes, groups_of
from trident.measuring.record import mean_and_interval
from trident.recipes.loading import formatted
from trident.report.figures import COLOURS, MARKERS, new_figure, style_of, styled


def grid_chart(grid: Grid, results: Results) -> Any:
    """Differences from the first group of seeds; accuracies, if there are none."""
    differences = {name: list(differences_of(grid, results, name).values()) for name in groups_of(grid)}
    if any(differences.values()):
        return differences_chart(grid, results, differences)
    return accuracies_chart(grid, results)


@styled()
def differences_chart(grid: Grid, results: Results, differences: Mapping[str, list[np.ndarray]]) -> Any:
    """How much each group of seeds is above or below the first one: for each seed that did not fail, (task,)."""
    first, *others = differences
    figure, axes = new_figure(8, 2.5 + 0.3 * len(others))
    labels = [name if differences[name] else f"{name} (no result)" for name in others]
    for place, name in enumerate(others):
        if of_seeds := differences[name]:
            mean, interval = mean_and_interval(np.mean(of_seeds, 0))
            axes.errorbar(mean, place, xerr=interval, color=COLOURS[0], marker=MARKERS[0], capsize=3)
            axes.plot(np.mean(of_seeds, 1), [place] * len(of_seeds), "k|", markersize=9)
    axes.axvline(0, linestyle=":", linewidth=1, color="grey")
    axes.set_yticks(range(len(others)), labels)
    axes.set_ylim(len(others) - 0.5, -0.5)  # the first one on top
    axes.set_xlabel(f"difference from {first}, points, with 95 % interval; black: each seed")
    _describe(figure, axes, grid, results)
    return figure


@styled()
def accuracies_chart(grid: Grid, results: Results) -> Any:
    """Accuracies and the paper's. If two settings vary, the first gives the lines, the second the x axis."""
    first, second = grid.labels.values() if len(grid.labels) == 2 else ("", "")
    places: dict[str, int] = {}  # on the x axis, by their label
    lines: dict[str, list[tuple[int, float, float]]] = {}  # place, accuracy and interval of the points, by line
    for cell in grid.cells:
        row, column = map(formatted, grid.varied(cell).values()) if first else ("", cell.name)
        place, line = places.setdefault(column, len(places)), f"{first} {row}".strip() or "accuracy"
        ours, paper = lines.setdefault(line, []), lines.setdefault(f"{line}, paper", [])
        if cell.name in results and (measured := results[cell.name].evaluation):
            ours.append((place, measured.accuracy, measured.ci95))
        if cell.name in grid.paper_figures:
            accuracy, interval = grid.paper_figures[cell.name]
            paper.append((place, accuracy, interval))
    figure, axes = new_figure(8, 5.5)
    for number, (label, points) in enumerate(lines.items()):
        row_number, of_paper = divmod(number, 2)
        if points:
            x, y, intervals = zip(*points, strict=True)
            shift = 0.08 * (row_number - len(lines) / 4 + 0.5)  # so that intervals do not hide each other
            style: dict[str, Any] = {**style_of(row_number)}
            style |= {"mfc": "none", "alpha": 0.6, "linestyle": "--"} if of_paper else {}
            style |= {} if first else {"linestyle": "none"}
            axes.errorbar([place + shift for place in x], y, intervals, label=label, capsize=3, **style)
    axes.set_xticks(list(places.values()), list(places), **({} if first else {"rotation": 30, "ha": "right"}))
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel(second)
    axes.set_ylabel("accuracy, %")
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside right upper", fontsize=8)
    _describe(figure, axes, grid, results)
    return figure


def _describe(figure: Any, axes: Any, grid: Grid, results: Results) -> None:
    axes.set_title(textwrap.fill(grid.summary, 80), fontsize=10)
    notes = "\n".join(textwrap.fill(note, 130) for note in footnotes(grid, results))
    figure.supxlabel(notes, fontsize=7, x=0.01, ha="left")
