"""All methods side by side: `trident leaderboard`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import leaderboard_app
from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.data.store import ImageStore
    from trident.leaderboard.rows import Board
    from trident.progress import Progress

Results = Annotated[Path | None, typer.Option("--results", help="Folder of results; default: the included ones.")]
SHOWN = "mini-1-shot"  # the board that is shown by default


@leaderboard_app.callback(invoke_without_command=True)
def leaderboard(
    context: typer.Context,
    board: Annotated[
        str | None, typer.Option(help=f"Which tasks; 'trident leaderboard boards' lists them.  [default: {SHOWN}]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure on the embedded letters, now.")] = False,
    tasks: Annotated[int | None, typer.Option(min=2, help="Tasks for --quick.  [default: 100]")] = None,
    results: Results = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Show the measured methods, on the very same tasks.

    The results are included, so nothing is computed. With --quick, methods that have weights for the embedded letters,
    or need none, are measured on scripts that they have not seen.
    """
    if context.invoked_subcommand is not None:
        return
    from tempfile import TemporaryDirectory

    from trident.leaderboard.rows import board_called

    shown = board_called("glyphs" if quick else board or SHOWN)  # a wrong name is reported before torch is imported
    from trident.leaderboard.results import FOLDER

    if quick:
        if results is not None or board not in (None, "glyphs"):
            raise TridentError("--quick measures the board glyphs and keeps no results: omit --board and --results")
        with TemporaryDirectory() as folder:
            stores = {"glyphs": opt.open_data("glyphs")}
            _measure([], [shown], stores, tasks or 100, Path(folder), opt.device_of(device), quiet=True)
            _show(shown, Path(folder), as_json)
        return
    if tasks is not None:
        raise TridentError("--tasks is for --quick: the kept results have tasks of their own")
    if results is not None and not results.is_dir():
        raise TridentError(f"there is no folder of results at {results}")
    _show(shown, results or FOLDER, as_json)


@leaderboard_app.command()
def boards(as_json: opt.Json = False) -> None:
    """List the boards: which tasks methods are measured on."""
    from trident.leaderboard.rows import BOARDS

    if as_json:
        opt.print_json([asdict(board) for board in BOARDS.values()])
    else:
        print("\n".join(opt.aligned([(board.name, board.title) for board in BOARDS.values()])))


@leaderboard_app.command()
def measure(
    results: Annotated[Path, typer.Option(help="Folder to keep the results in; it may hold others already.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[ROW]...", help="Methods; by default all.")] = None,
    board: Annotated[list[str] | None, typer.Option(help="Only these boards.")] = None,
    data: Annotated[Path | None, typer.Option(help="The store of miniImageNet.")] = None,
    cub: Annotated[Path | None, typer.Option(help="The store of CUB.")] = None,
    tasks: Annotated[
        int, typer.Option(min=2, help="Tasks under each condition; a fifth of them for queries alone.")
    ] = 1000,
    device: opt.Device = "auto",
) -> None:
    """Measure methods and keep the results; boards whose data are not given are skipped.

    'trident leaderboard --results FOLDER' shows them. A method needs a [[row]] in leaderboard/rows.toml and, unless it
    runs on frozen features, trained weights.
    """
    from trident.leaderboard.rows import BOARDS, board_called

    if results.exists() and not results.is_dir():
        raise TridentError(f"--results {results} is a file: it must be a folder")
    stores = {"glyphs": opt.open_data("glyphs")}
    stores |= {name: opt.open_data(str(path)) for name, path in (("mini", data), ("cub", cub)) if path is not None}
    chosen = [board_called(name) for name in board] if board else list(BOARDS.values())
    if "cub" in stores and "mini" not in stores:
        raise TridentError("--cub needs --data as well: temperatures are fitted on validation classes of miniImageNet")
    for wanted in chosen:
        if board and wanted.data not in stores:
            raise TridentError(f"board {wanted.name} needs {'--cub' if wanted.data == 'cub' else '--data'} STORE")
    if board is None and data is None:
        raise TridentError("measure on what? Give --data STORE, or --board glyphs for the embedded letters")
    chosen = [wanted for wanted in chosen if wanted.data in stores]
    _measure(names or [], chosen, stores, tasks, results, opt.device_of(device))


def _measure(
    names: list[str],
    boards: list["Board"],
    stores: dict[str, "ImageStore"],
    tasks: int,
    folder: Path,
    device: str,
    quiet: bool = False,
) -> None:
    from trident.cli.console import Counter, say
    from trident.leaderboard.measuring import Features, measure
    from trident.leaderboard.results import add
    from trident.leaderboard.rows import row_called, rows

    tell = (lambda _: None) if quiet else say
    chosen = [row_called(name) for name in names] or list(rows().values())
    with Counter("measuring") as bar:

        def stage(what: str) -> "Progress":
            return lambda done, total: bar(done, total, what)

        done, problem = 0, None
        for board in boards:
            features = Features(device, stage)
            store = stores[board.data]
            fitting = stores["mini"] if board.data == "cub" else store
            for row in chosen:
                try:
                    measured = measure(row, board, store, fitting, features, tasks, device, stage)
                except TridentError as error:
                    problem = error
                    if len(names) * len(boards) != 1:
                        tell(f"{row.name} on {board.name}: skipped, {error}")
                    continue
                add(row.name, board.name, measured, folder)
                done += 1
                accuracies = ", ".join(f"{name} {one.figure} %" for name, one in measured.items())
                tell(f"{row.name} on {board.name}: {accuracies}")
        if problem and not done:  # nothing of what was asked for can be done
            raise problem
    tell(f"the results are in {folder}")


def _show(board: "Board", folder: Path, as_json: bool) -> None:
    from trident.leaderboard.results import REFERENCE, lines_of, missing, tasks_by_condition

    lines = lines_of(board, folder)
    if not lines:
        how = "trident leaderboard --quick" if board.data == "glyphs" else "trident leaderboard measure --data STORE"
        raise TridentError(f"nothing was measured on {board.name} yet: {how}")
    if as_json:
        opt.print_json(
            [
                {"name": line.row.name, "title": line.row.title, "together": line.together, "assumes": line.row.assumes}
                | {"against": line.against, "published": line.published}
                | {"conditions": {name: record.to_json() for name, record in line.measured.items()}}
                for line in lines
            ]
        )
        return
    headings = ("method", *board.conditions, f"above {REFERENCE}", "ECE", "parameters", "queries")
    table = [
        (
            line.row.name,
            *map(line.figure, board.conditions),
            line.above,
            line.ece,
            f"{line.balanced.parameters:,}",
            "together" if line.together else "alone",
        )
        for line in lines
    ]
    print("\n".join(opt.aligned([headings, *table])))
    counts = ", ".join(f"{count} tasks {name}" for name, count in tasks_by_condition(lines).items())
    print(f"({board.title}; {counts}; shuffled queries, 95 % intervals, seed 0;")
    print("ECE with a temperature fitted on validation tasks; balanced: as many queries of each class;")
    print("dirichlet: class counts drawn from Dirichlet(2); alone: each query classified alone;")
    print("queries together: one changes the answer to another, be it only through batch norm)")
    assumed = [f"{line.row.name}: {line.row.assumes}" for line in lines if line.row.assumes]
    if assumed:
        print("\nWhat methods take for granted about the queries or the task:")
        print("\n".join(assumed))
    waiting = missing(board, folder)
    if waiting:
        print(f"\nNot measured: {', '.join(waiting)}")
