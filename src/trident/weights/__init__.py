"""Trained weights that are installed, most with a model card. They are loaded by name wherever a run is.

Some are included in this folder. Other packages add theirs by an entry point of the group `trident.weights` that names
a package with safetensors files, as `packages/weights` does.
"""

from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

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


@cache
def _folders() -> list[Path]:
    """This one comes first, so that no other package replaces its weights."""
    specs = [find_spec(entry.value) for entry in entry_points(group="trident.weights")]
    return [FOLDER, *(Path(path) for spec in specs if spec for path in spec.submodule_search_locations or [])]
