"""Grids of training runs: `trident ablate`."""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.grids.grid import Grid
    from trident.grids.tables import Results


@app.command(context_settings=opt.SETTINGS, short_help="Train a grid of settings.")
def ablate(
    grid: Annotated[
        str | None, typer.Argument(help="A grid's name, or the path of a TOML file. Omit it for a list.")
    ] = None,
    settings: opt.Settings = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; each cell gets a run folder in it.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print the table of the results in --out.")] = False,
    data: Annotated[
        str | None, typer.Option(help="A store made by 'trident data prepare'. The glyphs need none.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Use this recipe instead of the grid's.")] = None,
    split: Annotated[
        Literal["train", "val", "test"] | None, typer.Option(help="Split to measure on; default: the grid's.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=2, help="Tasks to measure on; default: the grid's.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="auto|ADDRESS",
            help="Spread the cells over a Ray cluster: HOST:PORT of its head node; auto: the one that runs here, or "
            "else a new one of this machine alone.",
            show_default=False,
        ),
    ] = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Train and measure a grid of runs. Finished cells are skipped, interrupted ones resume.

    \b
    trident ablate                              list the grids
    trident ablate glyphs-2x2                   show the cells of one
    trident ablate glyphs-2x2 --out DIR         train and measure them; run it again to resume
    trident ablate glyphs-2x2 --out DIR --show  print the table

    \b
    A grid is a TOML file with axes to cross, or with a list of cells:
      summary = "what it is about"
      recipe = "glyphs"
      settings.training.steps = 100       # the same in every cell
      [[axes]]                            # one setting ...
      setting = "method.attfex"
      values = ["positional", "off"]
      [[axes]]                            # ... or several that vary together
      settings = ["training.tasks_per_step", "method.inner_steps"]
      values = [[4, 3], [8, 1]]

    With --cluster, each cell is a task of a Ray cluster, on one CPU or one GPU. A cell whose node is lost goes on from
    its last save on another. All nodes must see DIR and the data at the same paths.

    Cells are measured on validation classes; --split test uses the test classes. DIR/CELL is an ordinary run with a
    result.json. DIR/table.md and DIR/plot.svg are written when all cells are finished, and by --show.
    """
    if grid is None and out is None:
        _print_names(as_json)
        return
    if grid is None or "=" in grid or grid.startswith("-"):
        raise TridentError("which grid? Name it before the settings; 'trident ablate' lists the grids")
    from trident.grids.files import read_grid

    read_grid(grid)  # a wrong name is reported before torch is imported
    from trident.grids.grid import load_grid

    loaded = load_grid(grid, opt.overrides_of(settings), recipe, split=split, tasks=tasks)
    if out is None:
        if show:
            raise TridentError("which folder? Give --out DIR, the folder of the grid")
        _print_table(loaded, {}, as_json)
    elif show:
        _report(loaded, out, as_json, show)
    else:
        _run(loaded, opt.data_of(loaded.cells[0].recipe, data, None), out, device, cluster)
        _report(loaded, out, as_json, show)


def _run(grid: "Grid", source: str, out: Path, device: str, cluster: str | None) -> None:
    if cluster is not None:
        from trident.ray_cluster import check_cluster

        check_cluster(cluster)
    store, device = opt.open_data(source), opt.device_of(device)
    from trident.cli.console import Counter, TrainingProgress, say
    from trident.grids.running import GridRun

    run = GridRun(grid, store, source, out, device, say, TrainingProgress, Counter)
    if cluster is None:
        stopped = run.run()
    else:
        from trident.grids.on_cluster import run_on_cluster

        stopped = run_on_cluster(run, cluster, opt.open_data)
    if stopped is not None:
        say(f"stopped in cell {stopped}; run the same command again to resume")
        raise typer.Exit(130)


def _report(grid: "Grid", out: Path, as_json: bool, show: bool) -> None:
    """Print the finished cells. If all are finished, or with --show, also write the table and the plot."""
    from trident.files import write_file
    from trident.grids.grid import read_results
    from trident.grids.tables import as_markdown

    results = read_results(grid, out)
    if show and not results:
        raise TridentError(f"no cell of {grid.name} is finished in {out}")
    _print_table(grid, results, as_json)
    if show or len(results) == len(grid.cells):
        write_file(out / "table.md", as_markdown(grid, results))
        if importlib.util.find_spec("matplotlib") is None:
            typer.echo("no plot: it needs matplotlib: pip install 'trident-fewshot[analysis]'", err=True)
        else:
            from trident.grids.plot import grid_chart
            from trident.report.figures import save_figure

            save_figure(grid_chart(grid, results), out / "plot.svg")
    failed = [name for name, result in results.items() if result.error]
    if failed and not show:
        again = f"to train one again, delete its folder in {out}"
        typer.echo(f"{len(failed)} of {len(grid.cells)} cells failed: {', '.join(failed)}; {again}", err=True)
        raise typer.Exit(1)


def _print_table(grid: "Grid", results: "Results", as_json: bool) -> None:
    from trident.grids.tables import as_values, footnotes, table_rows

    lines = [f"{grid.name}: {grid.summary}", "", *opt.aligned(table_rows(grid, results)), "", *footnotes(grid, results)]
    print(json.dumps(as_values(grid, results)) if as_json else "\n".join(lines))


def _print_names(as_json: bool) -> None:
    from trident.grids.files import grid_names, read_grid

    rows = [(name, file.n_cells, file.summary) for name in grid_names() for file, _ in [read_grid(name)]]
    if as_json:
        opt.print_json([dict(zip(("grid", "cells", "summary"), row, strict=True)) for row in rows])
    else:
        print("\n".join(opt.aligned([[name, f"{cells} cells", summary] for name, cells, summary in rows])))
