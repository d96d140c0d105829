"""Sorting labelled pictures into folders: `trident sort`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trident.cli.app import app
from trident.errors import TridentError, one_line


@app.command(short_help="Copy or move labelled pictures into a folder for each class.")
def sort(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="What 'trident predict --out' wrote: .csv or .json.")],
    target: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder for the class folders.")],
    move: Annotated[bool, typer.Option("--move", help="Move the pictures instead of copying them.")] = False,
    really: Annotated[
        bool, typer.Option("--yes", help="Really copy or move; without it, only print what would be done.")
    ] = False,
    add: Annotated[
        bool,
        typer.Option("--add", help="Also into class folders that hold other files, such as those of another pile."),
    ] = False,
) -> None:
    """Copy labelled pictures into DIR/CLASS, or move them there.

    The class is the label, or what you wrote into the column 'correction'. Pictures with neither, or of 'none of
    these', stay where they are. Run it in the folder in which 'trident predict' ran.

    No file is ever overwritten: where a name is taken, the picture gets a number. A picture that has changed since it
    was labelled is not sorted. After Ctrl-C or a kill, the same command does the rest.
    """
    from trident.cli.console import counting, say
    from trident.labelling.corrections import MARK, read_corrections
    from trident.labelling.sorting import carry_out, pictures_to_sort, plan, strangers

    if MARK not in read_corrections(table).columns:
        text = f"{table} has no column '{MARK}', so it cannot be checked that these are the same pictures"
        say(text)
    with counting("looking at pictures") as progress:
        pictures = pictures_to_sort(table, target, move, progress)
    labels = pictures.labels
    if not labels and not pictures.there and pictures.problems:
        raise TridentError(
            f"no picture of {table} can be sorted ({pictures.problems[0]}): run it where 'trident predict' ran; "
            "pictures must be files, not inside an archive"
        )
    steps = plan(labels, target, move)
    others = strangers(table, steps)
    if others and not add:
        raise TridentError(
            f"{others[0]} is not in {table}: sort into another folder if it was labelled by hand, for sorted pictures "
            "would count as labelled by hand too; --add sorts among such files"
        )
    steps = plan(labels, target, move)
    if pictures.left:
        text = f"sorted under another label than now: {len(pictures.left)}, the first is {pictures.left[0]}"
        say(f"{text}; they stay there")
    before = len(labels) - len(steps) + len(pictures.there)
    there = f"; {before} were there already" if before else ""
    verb = "move" if move else "copy"
    problems = pictures.problems
    if really:
        with counting("sorting pictures") as progress:
            result = carry_out(steps, target, move, progress)
        problems = problems + result.failures
        number = f"{result.done} of {len(steps)}" if result.failures else f"{result.done}"
        say(f"{verb.replace('y', 'ie')}d {number} pictures into {target}{there}")
    else:
        for source, place in steps:
            say(f"would {verb} {source} to {place}")
        say(f"nothing was done; --yes would {verb} {len(steps)} pictures{there}")
    for why in problems:
        print(f"trident: {one_line(why)}", file=sys.stderr)
    if problems:
        raise typer.Exit(2)
