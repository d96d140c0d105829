"""A grid's results as a table, and as plain values for JSON, with the paper's results if there are any."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trident.ablations.grid import Grid
from trident.ablations.results import Result
from trident.recipes.loading import shown

Results = Mapping[str, Result]  # by cell


def table_rows(grid: Grid, results: Results) -> list[list[str]]:
    """The table's entries, the heading first."""
    paper = ["paper"] if grid.paper_figures else []
    rows = [["cell", *grid.labels.values(), "accuracy", *paper, "parameters", "meta-updates"]]
    for cell in grid.cells:
        result, figures = results.get(cell.name), grid.paper_figures.get(cell.name)
        measured = result.evaluation if result else None
        accuracy = f"{measured.accuracy:.2f} ± {measured.ci95:.2f}" if measured else "failed" if result else "-"
        paper = [f"{figures[0]:.2f} ± {figures[1]:.2f}" if figures else "-"] if grid.paper_figures else []
        counts = [f"{result.parameters:,}", f"{result.steps:,}"] if result else ["-", "-"]
        rows.append([cell.name, *map(shown, grid.varied(cell).values()), accuracy, *paper, *counts])
    return rows


def footnotes(grid: Grid, results: Results) -> list[str]:
    """What the numbers are and how they were obtained."""
    notes = [f"{label} is {key}" for key, label in grid.labels.items() if label != key]
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
