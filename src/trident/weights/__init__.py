"""Trained weights that come with the package, each with a model card. They are loaded by name wherever a run is."""

from pathlib import Path

FOLDER = Path(__file__).parent


def weight_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def weights_file(name: str) -> Path:
    return FOLDER / f"{name}.safetensors"


def model_card(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")
