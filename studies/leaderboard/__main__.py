"""The leaderboard's document, page and figure: `python -m studies.leaderboard`."""

from pathlib import Path
from typing import Annotated

import typer

from studies.leaderboard.document import introduction_of, whole_document
from studies.leaderboard.page import page as make_page
from studies.leaderboard.plot import plotted_boards, unequal_counts
from trident.cli.app import main
from trident.cli.console import stderr
from trident.cli.leaderboard import Results
from trident.errors import TridentError
from trident.files import check_writable, write_file
from trident.leaderboard.results import FOLDER
from trident.measuring.record import FILE_NAME
from trident.report.figures import check_figure_path, save_figure

study = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@study.command()
def write(
    document: Annotated[Path | None, typer.Option(help="The Markdown document; its introduction is kept.")] = None,
    page: Annotated[Path | None, typer.Option(help="The HTML page to write.")] = None,
    figure: Annotated[Path | None, typer.Option(help="A figure (.svg, .png, .pdf): what unequal counts do.")] = None,
    results: Results = None,
) -> None:
    """Write the document, the page and the figure from the kept results. Nothing is measured."""
    if document is None and page is None and figure is None:
        raise TridentError("nothing to write: give --document FILE, --page FILE or --figure FILE")
    if figure is not None:
        check_figure_path(figure)
    for path in (document, page):
        if path is not None:
            check_writable(path)
    if results and not any([*results.glob(FILE_NAME), *results.glob("*.json")]):
        raise TridentError(f"--results {results} has no results: 'trident leaderboard measure' makes them")
    boards = plotted_boards(results or FOLDER) if figure is not None else []
    if figure is not None and not boards:
        raise TridentError("no figure: nothing was measured with unequal class counts on miniImageNet yet")
    made = []
    if document is not None:
        made.append((document, whole_document(introduction_of(document), results or FOLDER)))
    if page is not None:
        made.append((page, make_page(results or FOLDER)))
    for path, content in made:
        write_file(path, content)
    if figure is not None:
        save_figure(unequal_counts(boards), figure)
    for written in filter(None, (document, page, figure)):
        stderr.print(f"wrote {written}", soft_wrap=True)


if __name__ == "__main__":
    main(study)
