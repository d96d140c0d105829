"""What turns pictures into features: `trident backbones`."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.cli.tables import aligned

HEADINGS = ("backbone", "pictures", "features", "licence", "trained on", "installed")
CONV4 = {
    "name": "conv4",
    "image_size": 84,
    "features": 800,
    "licence": "MIT",
    "trained_on": "your data, or miniImageNet (the included weights)",
    "installed": True,
    "install": None,
}
ENSEMBLE = CONV4 | {"features": 4800, "trained_on": "miniImageNet's 64 training classes"}


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
    about = dict(CONV4) if name == "conv4" else _examined(name)
    if as_json:
        print(json.dumps(about))
        return
    shown = about | {"image_size": f"{about['image_size']}x{about['image_size']} pixels"}
    rows = [(key.replace("_", " "), _text(value)) for key, value in shown.items() if value is not None]
    print("\n".join(aligned(rows)))


def _print_list(as_json: bool) -> None:
    found = [dict(CONV4), *_listed()]
    if as_json:
        print(json.dumps(found))
        return
    print("\n".join(aligned([HEADINGS, *map(_row, found)])))
    print("'trident backbones NAME' loads one and prints what is known about it.")
    if not all(about["installed"] for about in found):
        print("To install:", *sorted({about["install"] for about in found if not about["installed"]}), sep="\n  ")


def _listed() -> list[dict[str, Any]]:
    """The frozen backbones, without loading them."""
    from importlib.util import find_spec

    from trident.backbones.pretrained import BACKBONES, INCLUDED, INSTALL, INSTALL_ONNX

    known = [
        {
            "name": name,
            "image_size": listed.facts.image_size,
            "features": listed.n_features,
            "licence": listed.facts.licence,
            "trained_on": listed.facts.trained_on,
            "installed": listed.installed,
            "install": INSTALL,
        }
        for name, listed in BACKBONES.items()
    ]
    of_the_user = dict.fromkeys(("image_size", "features", "licence", "trained_on"))
    onnx = {"name": "onnx:FILE", **of_the_user, "installed": find_spec("onnxruntime") is not None}
    python = {"name": "python:package.module:function", **of_the_user, "installed": True}
    return [*known, ENSEMBLE | {"name": INCLUDED}, onnx | {"install": INSTALL_ONNX}, python | {"install": None}]


def _examined(name: str) -> dict[str, Any]:
    from trident.backbones.pretrained import find_backbone

    found = find_backbone(name)
    return {"name": name, "features": found.n_features, **asdict(found.facts), "fingerprint": found.fingerprint}


def _row(about: dict[str, Any]) -> tuple[str, ...]:
    size = about["image_size"]
    facts = (size and f"{size}x{size}", about["features"], about["licence"], about["trained_on"])
    return about["name"], *(str(fact or "depends") for fact in facts), "yes" if about["installed"] else "no"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
