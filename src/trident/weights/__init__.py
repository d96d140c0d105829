"""Trained weights that come with the package, most with a model card. They are loaded by name wherever a run is."""

from pathlib import Path

FOLDER = Path(__file__).parent
FEW_SHOTS = 2  # labelled pictures of a class, on average, up to which the 1-shot weights are used


def weight_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def weights_file(name: str) -> Path:
    return FOLDER / f"{name}.safetensors"


def weights_for(n_pictures: int, n_classes: int) -> str:
    """The name of the weights that suit so many labelled photographs."""
    return "mini-5w1s-set" if n_pictures <= FEW_SHOTS * n_classes else "mini-5w5s-set"


def model_card(name: str) -> str | None:
    """The card that was written for these weights; None for those of the leaderboard, whose cards are made."""
    path = FOLDER / f"{name}.md"
    return path.read_text(encoding="utf-8") if path.is_file() else None
