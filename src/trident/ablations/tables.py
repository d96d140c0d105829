"""A grid's results as a table: for the terminal, as Markdown, and as plain values for JSON."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trident.ablations import Cell, Grid, setting_of, shown
from trident.ablations.records import Result

Results = Mapping[str, Result]  # by cell


class Matrix(NamedTuple):
    """A grid of two settings with a cell for every pair of their values."""

    row_setting: str
    column_setting: str
    cells: dict[Any, dict[Any, Cell]]  # by the values of the two


def matrix_of(grid: Grid) -> Matrix | None:
    """The grid as a matrix, if it is one."""
    if len(grid.labels) != 2:
        return None
    row_setting, column_setting = grid.labels
    cells: dict[Any, dict[Any, Cell]] = {}
    for cell in grid.cells:
        row, column = setting_of(cell.recipe, row_setting), setting_of(cell.recipe, column_setting)
        cells.setdefault(row, {})[column] = cell
    columns = [list(row) for row in cells.values()]
    full = all(set(row) == set(columns[0]) for row in columns) and len(cells) * len(columns[0]) == len(grid.cells)
    return Matrix(row_setting, column_setting, cells) if full and min(len(cells), len(columns[0])) > 1 else None


def table_rows(grid: Grid, results: Results) -> list[list[str]]:
    """The table's entries, the heading first."""
    matrix = matrix_of(grid)
    if matrix is None:
        return _list(grid, results)
    columns = list(next(iter(matrix.cells.values())))
    corner = f"{grid.labels[matrix.row_setting]} \\ {grid.labels[matrix.column_setting]}"
    body = [
        [shown(value), *(_figures(grid, row[column], results) for column in columns)]
        for value, row in matrix.cells.items()
    ]
    return [[corner, *map(shown, columns)], *body]


def _list(grid: Grid, results: Results) -> list[list[str]]:
    heading = [
        "cell",
        *grid.labels.values(),
        "accuracy",
        *(["paper"] if grid.paper else []),
        "parameters",
        "meta-updates",
    ]
    rows = [heading]
    for cell in grid.cells:
        result = results.get(cell.name)
        settings = [shown(setting_of(cell.recipe, key)) for key in grid.labels]
        counts = [f"{result.parameters:,}", f"{result.steps:,}"] if result else ["-", "-"]
        rows.append([cell.name, *settings, _accuracy(result), *([_paper(grid, cell)] if grid.paper else []), *counts])
    return rows


def footnotes(grid: Grid, results: Results, paper: str) -> list[str]:
    """What the numbers are and how they were obtained; `paper` says where the paper's stand."""
    notes = []
    named = [f"{label} is {key}" for key, label in grid.labels.items() if label != key]
    if named:
        notes.append("; ".join(named))
    notes.append("accuracy in % with its 95 % interval")
    protocols: dict[str, list[str]] = {}
    for name, result in results.items():
        if result.protocol is not None:
            protocols.setdefault(result.protocol, []).append(name)
    for protocol, cells in protocols.items():
        notes.append(protocol if len(protocols) == 1 else f"{', '.join(cells)}: {protocol}")
    if grid.paper:
        notes.append(f"{paper} the paper's figures ({grid.paper.table}), {grid.paper.note}")
    notes += [f"{result.cell} failed: {result.error}" for result in results.values() if result.error is not None]
    notes.append(f"{len(results)} of {len(grid.cells)} cells are finished")
    return notes


def as_text(grid: Grid, results: Results) -> str:
    rows = table_rows(grid, results)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{grid.name}: {grid.summary}", "", *lines, "", *_table_notes(grid, results)])


def as_markdown(grid: Grid, results: Results) -> str:
    rows = [[entry.replace("\\", "\\\\").replace("|", "\\|") for entry in row] for row in table_rows(grid, results)]
    heading, *body = [f"| {' | '.join(row)} |" for row in rows]
    lines = [heading, "|" + "---|" * len(rows[0]), *body]
    notes = [f"- {note}" for note in _table_notes(grid, results)]
    return "\n".join([f"# {grid.name}", "", grid.summary, "", *lines, "", *notes, ""])


def as_values(grid: Grid, results: Results) -> dict[str, Any]:
    return {
        "grid": grid.name,
        "summary": grid.summary,
        "settings": list(grid.labels),
        "finished": len(results),
        "cells": [_cell_values(grid, cell, results.get(cell.name)) for cell in grid.cells],
        "paper": {"table": grid.paper.table, "note": grid.paper.note} if grid.paper else None,
    }


def _cell_values(grid: Grid, cell: Cell, result: Result | None) -> dict[str, Any]:
    paper = grid.paper.accuracy.get(cell.name) if grid.paper else None
    return {
        "cell": cell.name,
        "settings": {key: setting_of(cell.recipe, key) for key in grid.labels},
        "state": "unfinished" if result is None else "finished" if result.error is None else "failed",
        "evaluation": result.evaluation if result else None,
        "error": result.error if result else None,
        "steps": result.steps if result else None,
        "best_step": result.best_step if result else None,
        "parameters": result.parameters if result else None,
        "seconds": result.seconds if result else None,
        "paper": {"accuracy": paper[0], "interval": paper[1]} if paper else None,
    }


def _table_notes(grid: Grid, results: Results) -> list[str]:
    return footnotes(grid, results, "in brackets" if matrix_of(grid) else "under 'paper'")


def _figures(grid: Grid, cell: Cell, results: Results) -> str:
    ours = _accuracy(results.get(cell.name))
    return f"{ours} ({_paper(grid, cell)})" if grid.paper else ours


def _accuracy(result: Result | None) -> str:
    if result is None:
        return "-"
    if result.evaluation is None:
        return "failed"
    return f"{result.evaluation['accuracy']:.2f} ± {result.evaluation['ci95']:.2f}"


def _paper(grid: Grid, cell: Cell) -> str:
    figures = grid.paper.accuracy.get(cell.name) if grid.paper else None
    return f"{figures[0]:.2f} ± {figures[1]:.2f}" if figures else "-"
