"""What turns pictures into features: `trident backbones`."""

import json
from typing import Annotated, Any

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.cli.tables import aligned

HEADINGS = ("backbone", "pictures", "features", "licence", "trained on", "installed")


@app.command(short_help="List the networks that make features, or examine one.")
def backbones(
    name: Annotated[
        str | None, typer.Argument(help="Load this one, for example onnx:model.onnx, and print what is known about it.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List the networks that turn pictures into features, or load one and print what is known about it.

    All but conv4 are frozen: they are used as they are. Those that begin with 'weights:' were trained here; the name
    may also be a run's folder or a weights file. Nothing is downloaded.
    """
    if name is None:
        _print_list(as_json)
        return
    from trident.backbones.pretrained import examined

    about = examined(name)
    if as_json:
        print(json.dumps(about))
        return
    shown = about | {"image_size": f"{about['image_size']}x{about['image_size']} pixels"}
    rows = [(key.replace("_", " "), _text(value)) for key, value in shown.items() if value is not None]
    print("\n".join(aligned(rows)))


def _print_list(as_json: bool) -> None:
    from trident.backbones.pretrained import listed

    found = listed()
    if as_json:
        print(json.dumps(found))
        return
    print("\n".join(aligned([HEADINGS, *map(_row, found)])))
    print("'trident backbones NAME' loads one and prints what is known about it.")
    if not all(about["installed"] for about in found):
        print("To install:", *sorted({about["install"] for about in found if not about["installed"]}), sep="\n  ")


def _row(about: dict[str, Any]) -> tuple[str, ...]:
    size = about["image_size"]
    facts = (size and f"{size}x{size}", about["features"], about["licence"], about["trained_on"])
    return about["name"], *(str(fact or "depends") for fact in facts), "yes" if about["installed"] else "no"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
