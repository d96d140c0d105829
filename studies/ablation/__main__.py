"""The ablations: `python -m studies.ablation` writes their tables and figures from the kept results."""

from pathlib import Path
from typing import Annotated

import typer

from trident.cli.app import main
from trident.files import write_file
from trident.grids.grid import load_grid, read_results
from trident.grids.plot import grid_chart
from trident.grids.tables import as_markdown
from trident.measuring.record import FILE_NAME, write_lines
from trident.report.figures import save_figure

FOLDER = Path(__file__).parent

study = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@study.command()
def ablation(
    name: Annotated[str, typer.Argument(help="parts or unlabelled.")],
    runs: Annotated[
        Path | None, typer.Option(help="Keep the results of this folder, --out of 'trident ablate'.")
    ] = None,
) -> None:
    """Write the table and the figure of an ablation from its kept results."""
    grid, folder = load_grid(str(FOLDER / f"{name}.toml")), FOLDER / name
    if runs is not None:
        newer = read_results(grid, folder) | read_results(grid, runs)
        write_lines(folder / FILE_NAME, {cell: result.to_json() for cell, result in newer.items()})
    results = read_results(grid, folder)
    write_file(folder / "table.md", as_markdown(grid, results))
    save_figure(grid_chart(grid, results), folder / "plot.svg")


if __name__ == "__main__":
    main(study)
