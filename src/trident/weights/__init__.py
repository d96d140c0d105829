"""Trained weights that are installed, most with a model card. They are loaded by name wherever a run is.

Some are included in this folder. Other packages add theirs by an entry point of the group `trident.weights` that names
a package with safetensors files, as `packages/weights` does.
"""

import difflib
import json
import math
import struct
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from trident.errors import TridentError

FOLDER = Path(__file__).parent
FEW_SHOTS = 2  # labelled pictures of a class, on average, up to which the 1-shot weights are used


def weight_names() -> list[str]:
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.safetensors")})


def weights_file(name: str) -> Path:
    found = (folder / f"{name}.safetensors" for folder in _folders())
    return next((path for path in found if path.is_file()), FOLDER / f"{name}.safetensors")


def weights_for(n_pictures: int, n_classes: int) -> str:
    """The name of the weights that suit so many labelled photographs."""
    return "mini-5w1s-set" if n_pictures <= FEW_SHOTS * n_classes else "mini-5w5s-set"


def model_card(name: str) -> str | None:
    """The card that was written for these weights; None for those of the leaderboard, whose cards are made."""
    path = weights_file(name).with_suffix(".md")
    return path.read_text(encoding="utf-8") if path.is_file() else None


class Header(NamedTuple):
    """What the beginning of a weights file says about it."""

    values: dict[str, Any]  # recipe, step, best, provenance, temperatures
    n_parameters: int

    @property
    def recipe(self) -> dict[str, Any]:
        return dict(self.values["recipe"])


def read_header(path: Path) -> Header:
    """Read the header of installed weights, without torch. `load_checkpoint` checks files that others have sent."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    values = json.loads(header["__metadata__"]["trident"])
    shapes = (tensor["shape"] for name, tensor in header.items() if name.startswith("parameters/"))
    return Header(values, sum(map(math.prod, shapes)))


def check_run(name: Path) -> None:
    """Whether a command can load this: a run, a weights file, a name of weights, or a recipe that needs no training."""
    from trident.recipes.files import recipe_names

    if name.exists() or name.suffix == ".toml" or str(name) in (*weight_names(), *recipe_names()):
        return
    close = difflib.get_close_matches(str(name), weight_names(), n=1, cutoff=0.8)
    hint = f": did you mean '{close[0]}'?" if close else ""
    raise TridentError(f"there is no run or weights file at {name}, and 'trident weights' does not list it{hint}")


@cache
def _folders() -> list[Path]:
    """This one comes first, so that no other package replaces its weights."""
    specs = [find_spec(entry.value) for entry in entry_points(group="trident.weights")]
    return [FOLDER, *(Path(path) for spec in specs if spec for path in spec.submodule_search_locations or [])]
