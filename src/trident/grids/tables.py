"""A grid's results as a table, and as plain values for JSON, with the paper's results if there are any."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from trident.grids.grid import Cell, Grid, Result
from trident.measuring.record import mean_and_interval, plus_minus
from trident.recipes.loading import formatted

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
    for name, cells in groups_of(grid).items():
        cell, figures = cells[0], grid.paper_figures.get(name)
        ended = [results[one.name] for one in cells if one.name in results]
        result = min(ended, key=lambda one: one.error is not None, default=None)  # one that did not fail, if there is
        measured = result.evaluation if result else None
        accuracy = measured.figure if measured else "failed" if result else "-"
        if whole:
            accuracy, *compared = _over_seeds(grid, results, name)
        paper = [plus_minus(figures[0], figures[1]) if figures else "-"] if grid.paper_figures else []
        counts = [f"{result.parameters:,}", f"{result.steps:,}"] if result else ["-", "-"]
        varied = [formatted(value) for value in grid.varied(cell).values()]
        if listed:
            varied = [", ".join(f"{key}={formatted(value)}" for key, value in grid.changed(cell).items()) or "-"]
        rows.append([name, *varied, accuracy, *compared, *paper, *counts])
    return rows


def groups_of(grid: Grid) -> dict[str, list[Cell]]:
    """The cells that differ in their seed only; each cell alone, if the grid has no seeds."""
    groups: dict[str, list[Cell]] = {}
    for cell in grid.cells:
        groups.setdefault(cell.group or cell.name, []).append(cell)
    return groups


def _over_seeds(grid: Grid, results: Results, name: str) -> list[str]:
    """Of those that did not fail, once all have ended: mean accuracy, each, and the difference from the first group."""
    own = groups_of(grid)[name]
    each = [_of_tasks(cell, results) for cell in own]  # (task,) each
    failed = [_failed(cell, results) for cell in own]
    shown = ["-" if accuracies is None else f"{accuracies.mean():.2f}" for accuracies in each]
    by_seed = " / ".join("failed" if bad else text for text, bad in zip(shown, failed, strict=True))
    finished = [accuracies for accuracies in each if accuracies is not None]
    if not finished or len(finished) + sum(failed) < len(own):
        return ["-", by_seed, "-"]
    mean = plus_minus(*mean_and_interval(np.mean(finished, 0)))
    differences = differences_of(grid, results, name)
    if not differences:
        return [mean, by_seed, "-"]
    of_seeds = " / ".join(f"{differences[n].mean():+.2f}" if n in differences else "failed" for n in range(len(own)))
    difference = plus_minus(*mean_and_interval(np.mean(list(differences.values()), 0)), sign="+")
    return [mean, by_seed, f"{difference} ({of_seeds})"]


def differences_of(grid: Grid, results: Results, name: str) -> dict[int, np.ndarray]:
    """How much a group is above the first one in each task, in points, by the place of the seed: (task,) each.

    Seeds with which either group failed are left out. Empty if one of the others is not measured yet, or if the two
    groups have other tasks.
    """
    groups, whole = groups_of(grid), grid.cells[0].group
    if not whole or name == whole or _tasks(groups[name][0]) != _tasks(groups[whole][0]):
        return {}
    differences = {}
    for place, pair in enumerate(zip(groups[name], groups[whole], strict=True)):
        if any(_failed(cell, results) for cell in pair):
            continue
        above, below = (_of_tasks(cell, results) for cell in pair)
        if above is None or below is None:
            return {}
        differences[place] = above - below
    return differences


def _failed(cell: Cell, results: Results) -> bool:
    return cell.name in results and results[cell.name].error is not None


def _of_tasks(cell: Cell, results: Results) -> np.ndarray | None:
    """The accuracy in each task, in percent, if the cell is finished: (task,)."""
    result = results.get(cell.name)
    return result.evaluation.accuracies if result and result.evaluation else None


def _tasks(cell: Cell) -> tuple[object, ...]:
    """What decides which tasks a cell is measured on, besides the grid's own settings."""
    return cell.recipe.episode, cell.recipe.protocol.balance, cell.recipe.protocol.dirichlet_alpha


def footnotes(grid: Grid, results: Results) -> list[str]:
    """What the numbers are and how they were obtained."""
    labels = {} if len(grid.labels) > MOST_COLUMNS else grid.labels
    notes = [f"{label} is {key}" for key, label in labels.items() if label != key]
    if grid.cells[0].group:
        notes.append(
            "accuracies are means over the seeds that did not fail; differences are paired by task and by seed, those "
            "of each seed in brackets; intervals are over tasks, not over seeds"
        )
    if (sample := grid.evaluation) is not None:
        notes.append(f"accuracy in % with its 95 % interval, on {sample.tasks} {sample.split} tasks")
    notes += _protocols(grid, results)
    if grid.paper_figures:
        notes.append(f"the paper's figures: {grid.paper.table}, {grid.paper.note}")
    failed = [f"{name} failed: {result.error}" for name, result in results.items() if result.error]
    finished = f"{len(results)} of {len(grid.cells)} cells are finished"
    return [*notes, *failed, f"{finished}, {len(failed)} of them failed" if failed else finished]


def _protocols(grid: Grid, results: Results) -> list[str]:
    """The protocol of most cells is the last, and does not name them."""
    cells: dict[str, list[str]] = {}
    for cell in grid.cells:
        if cell.name in results and (measured := results[cell.name].evaluation):
            cells.setdefault(measured.described, []).append(cell.group or cell.name)
    *few, most = sorted(cells, key=lambda protocol: len(cells[protocol])) or [""]
    notes = [f"{', '.join(dict.fromkeys(cells[protocol]))}: {protocol}" for protocol in few]
    return [*notes, f"all other finished cells: {most}" if few else most] if most else []


def as_markdown(grid: Grid, results: Results) -> str:
    notes = [f"- {note}" for note in footnotes(grid, results)]
    return "\n".join(
        [f"# {grid.name}", "", grid.summary, "", *markdown_table(table_rows(grid, results)), "", *notes, ""]
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is the heading."""
    lines = [" | ".join(entry.replace("|", "\\|") for entry in row) for row in rows]
    heading, *body = (f"| {line} |" for line in lines)
    return [heading, "|" + "---|" * len(rows[0]), *body]


def as_values(grid: Grid, results: Results) -> dict[str, Any]:
    cells = []
    for cell in grid.cells:
        result, figures = results.get(cell.name), grid.paper_figures.get(cell.group or cell.name)
        state = "unfinished" if result is None else "failed" if result.error else "finished"
        paper = {"accuracy": figures[0], "interval": figures[1]} if figures else None
        known = result.to_json() if result else {}
        name = {"cell": cell.name} | ({"group": cell.group} if cell.group else {})
        cells.append({**name, "state": state, **known, "settings": grid.varied(cell), "paper": paper})
    return {"grid": grid.name, "summary": grid.summary, "cells": cells, "paper": asdict(grid.paper)}
