"""A grid's results as a table, and as plain values for JSON, with the paper's results if there are any."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from trident.ablations.grid import Cell, Grid
from trident.ablations.results import Result
from trident.measuring.evaluate import mean_and_interval
from trident.measuring.hits import unpacked
from trident.recipes.loading import shown

MOST_COLUMNS = 4  # of settings that vary: if there are more, one column says what changed
Results = Mapping[str, Result]  # by cell


def table_rows(grid: Grid, results: Results) -> list[list[str]]:
    """The table's entries, the heading first."""
    paper = ["paper"] if grid.paper_figures else []
    whole = grid.cells[0].group
    compared = ["by seed", f"difference from {whole}"] if whole else []
    listed = len(grid.labels) > MOST_COLUMNS
    varied = ["changed"] if listed else list(grid.labels.values())
    rows = [["cell", *varied, "accuracy", *compared, *paper, "parameters", "meta-updates"]]
    for name, cells in _groups(grid).items():
        cell, result, figures = cells[0], results.get(cells[0].name), grid.paper_figures.get(name)
        measured = result.evaluation if result else None
        accuracy = f"{measured.accuracy:.2f} ± {measured.ci95:.2f}" if measured else "failed" if result else "-"
        if whole:
            accuracy, *compared = _over_seeds(grid, results, name)
        paper = [f"{figures[0]:.2f} ± {figures[1]:.2f}" if figures else "-"] if grid.paper_figures else []
        counts = [f"{result.parameters:,}", f"{result.steps:,}"] if result else ["-", "-"]
        varied = [shown(value) for value in grid.varied(cell).values()]
        if listed:
            varied = [", ".join(f"{key}={shown(value)}" for key, value in grid.changed(cell).items()) or "-"]
        rows.append([name, *varied, accuracy, *compared, *paper, *counts])
    return rows


def _groups(grid: Grid) -> dict[str, list[Cell]]:
    """The cells that differ in their seed only; each cell alone, if the grid has no seeds."""
    groups: dict[str, list[Cell]] = {}
    for cell in grid.cells:
        groups.setdefault(cell.group or cell.name, []).append(cell)
    return groups


def _over_seeds(grid: Grid, results: Results, name: str) -> list[str]:
    """Mean accuracy over the seeds, the accuracy of each, and how much the mean is above that of the first group."""
    groups = _groups(grid)
    of_each = {group: of_tasks(groups[group], results) for group in (name, grid.cells[0].group)}
    own, first = of_each[name], of_each[grid.cells[0].group]
    if own is None:
        return ["-"] * 3
    mean, interval = mean_and_interval(own.mean(0))
    by_seed = " / ".join(f"{accuracy:.2f}" for accuracy in own.mean(1))
    difference = "-"
    if first is not None and first is not own and first.shape[1] == own.shape[1]:
        difference = "{:+.2f} ± {:.2f}".format(*mean_and_interval(own.mean(0) - first.mean(0)))
    return [f"{mean:.2f} ± {interval:.2f}", by_seed, difference]


def of_tasks(cells: Sequence[Cell], results: Results) -> np.ndarray | None:
    """Accuracies of cells on the same tasks, in percent: (cell, task); of the finished cells only."""
    found = [
        100 * unpacked(result.hits) / cell.recipe.episode.n_counted
        for cell in cells
        if (result := results.get(cell.name)) and result.hits
    ]
    return np.stack(found) if found else None


def footnotes(grid: Grid, results: Results) -> list[str]:
    """What the numbers are and how they were obtained."""
    labels = {} if len(grid.labels) > MOST_COLUMNS else grid.labels
    notes = [f"{label} is {key}" for key, label in labels.items() if label != key]
    if grid.cells[0].group:
        notes.append(
            "accuracies are means over the seeds; differences are paired by task, and their intervals are over tasks, "
            "not over seeds"
        )
    notes.append(f"accuracy in % with its 95 % interval, on {grid.evaluation.tasks} {grid.evaluation.split} tasks")
    protocols = {name: result.protocol for name, result in results.items() if result.protocol}
    for protocol in dict.fromkeys(protocols.values()):
        cells = [name for name in protocols if protocols[name] == protocol]
        notes.append(protocol if len(cells) == len(protocols) else f"{', '.join(cells)}: {protocol}")
    if grid.paper_figures:
        notes.append(f"the paper's figures: {grid.paper.table}, {grid.paper.note}")
    notes += [f"{name} failed: {result.error}" for name, result in results.items() if result.error]
    return [*notes, f"{len(results)} of {len(grid.cells)} cells are finished"]


def as_markdown(grid: Grid, results: Results) -> str:
    rows = [[entry.replace("|", "\\|") for entry in row] for row in table_rows(grid, results)]
    heading, *body = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"- {note}" for note in footnotes(grid, results)]
    lines = [f"# {grid.name}", "", grid.summary, "", heading, "|" + "---|" * len(rows[0]), *body, "", *notes, ""]
    return "\n".join(lines)


def as_values(grid: Grid, results: Results) -> dict[str, Any]:
    cells = []
    for cell in grid.cells:
        result, figures = results.get(cell.name), grid.paper_figures.get(cell.name)
        state = "unfinished" if result is None else "failed" if result.error else "finished"
        paper = {"accuracy": figures[0], "interval": figures[1]} if figures else None
        known = asdict(result) if result else {}
        cells.append({"cell": cell.name, "state": state, **known, "settings": grid.varied(cell), "paper": paper})
    return {"grid": grid.name, "summary": grid.summary, "cells": cells, "paper": asdict(grid.paper)}
