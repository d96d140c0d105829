"""Grids of training runs: `trident ablate`."""

import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trident.cli.app import app
from trident.cli.options import SETTINGS, Device, Json, Settings, data_of, device_of, open_data, overrides_of
from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.ablations import Cell, Grid
    from trident.ablations.records import Result
    from trident.learning.training import Observer
    from trident.measuring.evaluate import Progress


@app.command(context_settings=SETTINGS, short_help="Train a grid of settings.")
def ablate(
    grid: Annotated[
        str | None,
        typer.Argument(help="A grid's name, or the path of a TOML file. May be left away if --out holds a grid."),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the grid, with a run's folder for each cell.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Train nothing: print the table of the grid in --out.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="K/N", help="Only the K-th of N shares of the cells: K, K+N, K+2N ...")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A store made by 'trident data prepare'. The glyphs need none.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe to use in place of the grid's own.")] = None,
    split: Annotated[
        Literal["train", "val", "test"] | None, typer.Option(help="Classes to measure on; by default as in the grid.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=2, help="Tasks to measure on; by default as in the grid.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train and measure a grid of runs; finished cells are never redone, stopped ones go on.

    \b
    trident ablate                              list the grids
    trident ablate glyphs-2x2                   show the cells of one
    trident ablate glyphs-2x2 --out DIR         train and measure them; again to go on
    trident ablate glyphs-2x2 --out DIR --show  print the table

    \b
    A grid is a TOML file with axes to cross, or cells one by one:
      summary = "what it is about"
      recipe = "glyphs"
      [settings]                          # the same in every cell
      training.steps = 100
      [[axes]]                            # one setting ...
      setting = "model.attfex"
      values = ["positional", "off"]
      [[axes]]                            # ... or several that vary together
      settings = ["training.tasks_per_step", "adaptation.steps"]
      values = [[4, 3], [8, 1]]

    Several processes may share DIR: each cell is trained by one of them. Machines without a common disk take shares
    with --only 1/2 and --only 2/2; put their folders together and --show makes one table. Cells are measured on
    validation classes unless --split test asks for the test classes.

    DIR/CELL is an ordinary run with a result.json; DIR/table.md and DIR/plot.svg are written when all cells are
    finished, and by --show.
    """
    from trident.ablations import load_grid
    from trident.ablations.records import check_same, read_folder, read_results

    overrides, changed = overrides_of(settings), bool(settings or recipe or split or tasks)
    if grid is None and out is None:
        _print_names(as_json)
        return
    if grid is not None and ("=" in grid or grid.startswith("-")):
        raise TridentError("which grid? Name it before any setting; 'trident ablate' lists the grids")
    loaded = load_grid(grid, overrides, recipe, split, tasks) if grid is not None else None
    if out is None:
        if show or only:
            raise TridentError("which folder? Give --out DIR, the folder of the grid")
        assert loaded is not None
        _print_cells(loaded, as_json)
        return
    found = read_folder(out)
    if loaded is None and changed:
        raise TridentError(f"which grid? Name it too, or leave its settings away to go on with the one in {out}")
    if found is None and (loaded is None or show):
        raise TridentError(f"there is no grid in {out}: start one with 'trident ablate GRID --out {out}'")
    if show:
        assert found is not None
        if only:
            raise TridentError("--show shows all cells: leave --only away")
        if loaded is not None and (changed or loaded.name != found.grid.name):
            check_same(found.grid, loaded, out)
        _report(found.grid, read_results(found.grid, out), out, as_json, files=True)
        return
    if loaded is not None and found is not None:
        check_same(found.grid, loaded, out)  # before its data are opened: another grid may need others
    working = loaded or (found.grid if found else None)
    assert working is not None
    source = data_of(working.cells[0].recipe, data or (found.data if found else None), None)
    _run(working, source, out, device, _share(only, len(working.cells)), as_json)


def _run(grid: "Grid", source: str, out: Path, device: str, cells: list[int], as_json: bool) -> None:
    store, device = open_data(source), device_of(device)
    from trident.ablations.records import read_results
    from trident.ablations.running import run_grid
    from trident.cli.console import stderr

    outcome = run_grid(grid, store, source, out, device, _Watcher(len(grid.cells)), cells)
    if outcome.stopped is not None:
        cell, step = outcome.stopped
        stderr.print(
            f"stopped in cell {cell} after step {step}; go on with: trident ablate --out {out}", soft_wrap=True
        )
        raise typer.Exit(130)
    results = read_results(grid, out)
    _report(grid, results, out, as_json, files=len(results) == len(grid.cells))
    if outcome.busy:
        stderr.print(f"left to other processes: {', '.join(outcome.busy)}", soft_wrap=True)
    failed = [name for name, result in results.items() if result.error is not None]
    if failed:
        stderr.print(
            f"{len(failed)} of {len(grid.cells)} cells failed: {', '.join(failed)}; to train one again, delete its "
            f"folder in {out}",
            soft_wrap=True,
        )
        raise typer.Exit(1)


def _report(grid: "Grid", results: "dict[str, Result]", out: Path, as_json: bool, files: bool) -> None:
    """Print what is finished; `files` writes it too."""
    from trident.ablations.plot import grid_chart
    from trident.ablations.tables import as_markdown, as_text, as_values
    from trident.files import atomic_file
    from trident.report.figures import save_figure

    print(json.dumps(as_values(grid, results), allow_nan=False) if as_json else as_text(grid, results))
    if not files:
        return
    with atomic_file(out / "table.md") as file:
        file.write(as_markdown(grid, results).encode())
    if importlib.util.find_spec("matplotlib") is None:
        from trident.cli.console import stderr  # only here: it loads torch, which a table can do without

        stderr.print("no plot without matplotlib: pip install 'trident-fewshot[analysis]'", soft_wrap=True)
        return
    save_figure(grid_chart(grid, results), out / "plot.svg")


def _share(only: str | None, n_cells: int) -> list[int]:
    """The numbers, from 1, of the cells that `--only K/N` means."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", only or "1/1")
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise TridentError(f"--only is '{only}': write K/N with K from 1 to N, such as 1/2 and 2/2 for two machines")
    return list(range(int(match[1]), n_cells + 1, int(match[2])))


def _print_names(as_json: bool) -> None:
    from trident.ablations import grid_names, load_grid

    grids = [load_grid(name) for name in grid_names()]
    if as_json:
        print(json.dumps([{"grid": grid.name, "summary": grid.summary, "cells": len(grid.cells)} for grid in grids]))
        return
    for grid in grids:
        print(f"{grid.name:16} {len(grid.cells)} cells  {grid.summary}")


def _print_cells(grid: "Grid", as_json: bool) -> None:
    from trident.ablations import shown
    from trident.ablations.tables import as_values

    if as_json:
        print(json.dumps(as_values(grid, {})))
        return
    print(f"{grid.name}: {grid.summary}\n")
    for number, cell in enumerate(grid.cells, 1):
        values = " ".join(f"{key}={shown(value)}" for key, value in cell.settings.items())
        print(f"{number:3} {cell.name:32} {values}")
    at = grid.evaluation
    print(f"\neach from recipe {grid.cells[0].recipe.name}, measured on {at.tasks} tasks of the {at.split} classes")


class _Watcher:
    """Says which cell is at work, and shows a bar for it."""

    def __init__(self, n_cells: int):
        self._n_cells = n_cells

    def on_cell(self, number: int, cell: "Cell", news: str) -> None:
        from trident.cli.console import stderr

        stderr.print(f"cell {number}/{self._n_cells} {cell.name}: {news}", soft_wrap=True)

    def training(self, step: int, steps: int) -> "AbstractContextManager[Observer]":
        from trident.cli.console import TrainingProgress

        return TrainingProgress(step, steps)

    @contextmanager
    def evaluating(self) -> "Iterator[Progress]":
        from trident.cli.console import counting

        with counting("evaluating tasks") as progress:
            yield progress
