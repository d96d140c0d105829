"""Labelling your own pictures: `trident predict`."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trident.cli.app import app
from trident.cli.options import Device, Json, device_of
from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.data.images import ImageFile
    from trident.labelling.labeller import Labelled, Labeller


@app.command(short_help="Label your own pictures.")
def predict(
    support: Annotated[Path, typer.Option(help="Labelled pictures: a folder with one folder for each class.")],
    query: Annotated[Path, typer.Option(help="The pictures to label: a folder, including its subfolders.")],
    weights: Annotated[
        str,
        typer.Option(help="A name from 'trident weights', a run or a file; auto: by the number of labelled pictures."),
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the table to this file: .csv or .json.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show all classes, not only the best two.")] = False,
    threshold: Annotated[
        float,
        typer.Option(min=0, max=1, help="Give no label below this probability; the best guess gets its own column."),
    ] = 0.0,
    copy: Annotated[Path | None, typer.Option(help="Copy labelled pictures into class folders in this folder.")] = None,
    move: Annotated[Path | None, typer.Option(help="The same, but move them.")] = None,
    really: Annotated[
        bool, typer.Option("--yes", help="Really copy or move; without it, only print what would be done.")
    ] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Label pictures from a few labelled examples, and print a CSV table of path, label and probability.

    Pictures may have any size: the middle square is scaled to the network's input size. Pictures are classified
    together, in chunks of up to 100. Unreadable pictures are skipped and named on standard error; the exit code is
    then 2.
    """
    from trident.cli.console import counting, stderr
    from trident.data.images import silence_pillow
    from trident.files import check_writable
    from trident.labelling.labeller import label_pile

    silence_pillow()

    if copy is not None and move is not None:
        raise TridentError("--copy and --move exclude each other: give one of them")
    if really and copy is None and move is None:
        raise TridentError("--yes needs --copy DIR or --move DIR")
    if out is not None and out.suffix.lower() not in (".csv", ".json"):
        raise TridentError(f"--out {out}: the file must end in .csv or .json")
    if as_json and out is not None and out.suffix.lower() == ".csv":
        raise TridentError("--json goes to standard output: omit it, or give --out a file that ends in .json")
    if out is not None:
        check_writable(out)
    target = copy or move
    by_class, unread = _labelled(support)
    pile, more = _pile(query, support, [support] if target is None else [support, target])
    unread |= more
    labeller = _labeller(by_class, weights, device_of(device))
    with counting("labelling pictures") as progress:
        labelled = label_pile(labeller, pile, progress)
    names = [str(source.path) for source in pile]
    skipped = {names[place]: why for place, why in labelled.failures.items()} | unread
    wants_json = out.suffix.lower() == ".json" if out is not None else as_json
    if wants_json:
        _write(_as_json(labelled, names, threshold, every, skipped), out)
    else:
        _write(_as_csv(labelled, names, threshold, every), out)
    if out is not None:
        sure = sum(bool(_label(labelled, place, threshold)) for place in range(len(names)))
        stderr.print(f"labelled {sure} of {len(names)} pictures, see {out}", soft_wrap=True)
    if target is not None:
        from trident.labelling.sorting import carry_out, plan

        labels = {path: _label(labelled, place, threshold) for place, path in enumerate(names)}
        steps = plan({Path(path): label for path, label in labels.items() if label}, target, moving=move is not None)
        verb = "move" if move is not None else "copy"
        if really:
            carry_out(steps, moving=move is not None)
            stderr.print(f"{verb.replace('y', 'ie')}d {len(steps)} pictures into {target}", soft_wrap=True)
        else:
            for source, place in steps:
                stderr.print(f"would {verb} {source} to {place}", soft_wrap=True)
            stderr.print(f"nothing was done; --yes would {verb} {len(steps)} pictures", soft_wrap=True)
    for why in skipped.values():
        print(f"trident: skipped {' '.join(why.split())}", file=sys.stderr)
    if skipped:
        raise typer.Exit(2)


def _labelled(support: Path) -> "tuple[dict[str, list[ImageFile]], dict[str, str]]":
    """The pictures of each class, and an error message for each unreadable path."""
    from trident.data.pictures import find_pictures
    from trident.data.readers import subfolders

    if not support.is_dir():
        raise TridentError(f"--support {support}: there is no such folder; it must hold one folder for each class")
    found = {folder.name: find_pictures(folder) for folder in subfolders(support)}
    if not found:
        raise TridentError(f"--support {support} has no class folders: expected {support}/CLASS/PICTURE.jpg")
    by_class = {name: pictures for name, (pictures, _) in found.items()}
    unread = {path: line for _, lines in found.values() for path, line in lines.items()}
    empty = [name for name, files in by_class.items() if not files]
    if empty:
        why = f" ({next(iter(unread.values()))})" if unread else ""
        raise TridentError(f"--support {support}: class '{empty[0]}' has no pictures{why}")
    beside, _ = find_pictures(support, without=subfolders(support))
    if beside:
        why = f"it is not in a class folder: expected {support}/CLASS/{beside[0].path.name}"
        unread |= {str(source.path): f"{source.path}: {why}" for source in beside}
    return by_class, unread


def _labeller(by_class: "dict[str, list[ImageFile]]", weights: str, device: str) -> "Labeller":
    from trident.cli.console import stderr
    from trident.labelling.labeller import Labeller, read_labelled
    from trident.learning.checkpoint import load_checkpoint
    from trident.weights import weights_for

    auto = weights_for(sum(map(len, by_class.values())), len(by_class))
    name = auto if weights == "auto" else weights
    checkpoint = load_checkpoint(name)
    backbone = checkpoint.recipe.backbone
    labeller = Labeller(checkpoint, *read_labelled(by_class, backbone.image_size, backbone.image_channels), device)
    stderr.print(f"weights: {Path(name).stem}, {checkpoint.described()}", soft_wrap=True)
    return labeller


def _pile(query: Path, support: Path, without: list[Path]) -> "tuple[list[ImageFile], dict[str, str]]":
    """The pictures to label, and an error message for each unreadable path. Omits labelled and sorted pictures."""
    from trident.data.pictures import find_pictures

    if not query.is_dir():
        what = "that is a file" if query.is_file() else "there is no such folder"
        raise TridentError(f"--query {query}: {what}; it must be a folder of pictures")
    if query.resolve().is_relative_to(support.resolve()):
        raise TridentError(f"--query {query} is inside --support {support}: choose another folder of pictures to label")
    pictures, unread = find_pictures(query, without)
    if not pictures:
        why = f" ({next(iter(unread.values()))})" if unread else ""
        raise TridentError(f"--query {query}: it has no picture to label{why}")
    return pictures, unread


def _label(labelled: "Labelled", place: int, threshold: float) -> str:
    """Empty if the picture cannot be read or its probability is below the threshold."""
    if place in labelled.failures:
        return ""
    label, probability = labelled.ranking(place)[0]
    return label if probability >= threshold else ""


def _as_csv(labelled: "Labelled", names: list[str], threshold: float, every: bool) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    head = ["path", "label", "probability", "runner_up", "runner_up_probability"]
    guessed = ["best_guess"] if threshold > 0 else []  # otherwise it is the label
    table.writerow([*head, *guessed, *(f"p({name})" for name in labelled.classes if every)])
    for place, name in enumerate(names):
        if place in labelled.failures:
            continue
        (best, first), (second, next_best) = labelled.ranking(place)[:2]
        row = [name, _label(labelled, place, threshold), f"{first:.4f}", second, f"{next_best:.4f}"]
        row += [best] if guessed else []
        table.writerow([*row, *(f"{p:.4f}" for p in labelled.probabilities[place] if every)])
    return text.getvalue()


def _as_json(labelled: "Labelled", names: list[str], threshold: float, every: bool, skipped: dict[str, str]) -> str:
    rows = []
    for place, name in enumerate(names):
        if place in labelled.failures:
            continue
        ranking = labelled.ranking(place)
        row: dict[str, Any] = {
            "path": name,
            "label": _label(labelled, place, threshold) or None,
            "best_guess": ranking[0][0],
            "probability": ranking[0][1],
            "runner_up": ranking[1][0],
            "runner_up_probability": ranking[1][1],
        }
        rows.append(row | ({"probabilities": dict(ranking)} if every else {}))
    failures = [{"path": path, "error": why} for path, why in skipped.items()]
    return json.dumps({"classes": list(labelled.classes), "pictures": rows, "skipped": failures}, indent=1) + "\n"


def _write(text: str, out: Path | None) -> None:
    if out is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
        return
    from trident.files import atomic_file

    with atomic_file(out) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
