"""Small networks in place of a pretrained backbone, for `--backbone python:stand_in_backbone:colours`."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

NAME = "python:stand_in_backbone:colours"
SLOW = "python:stand_in_backbone:slow"
SEEN = "STAND_IN_SEEN"  # names the file into which `slow` writes a line for every picture it computes
PAUSE = "STAND_IN_PAUSE"  # seconds that `slow` takes for a batch
EVIDENCE = "heads weighed by the labelled pictures"
PATH = {"PYTHONPATH": str(Path(__file__).parent)}  # for commands in processes of their own


class Colours(nn.Module):
    """The colours of the quarters of a picture, through a random layer: pictures of one colour are alike."""

    image_size, licence, trained_on = 16, "MIT", "nothing"

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(12, 32)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(32, 12, generator=generator))
            self.layer.bias.zero_()

    def forward(self, pictures: Tensor) -> Tensor:
        return F.relu(self.layer(F.adaptive_avg_pool2d(pictures, 2).flatten(1)))


class Slow(Colours):
    """The same, but slow, and it leaves a trace of each picture."""

    def forward(self, pictures: Tensor) -> Tensor:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError("a trace would not be slow")
        time.sleep(float(os.environ.get(PAUSE, "0")))
        found = super().forward(pictures)
        if SEEN in os.environ:
            with Path(os.environ[SEEN]).open("a") as file:
                file.writelines(
                    hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest() + "\n" for one in pictures
                )
        return found


def colours() -> nn.Module:
    return Colours()


def slow() -> nn.Module:
    return Slow()


def made_up(
    n_classes: int, counts: Any, n_features: int = 64, spread: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Clusters of features (picture, feature) float32 around one direction for each class, and their classes."""
    generator = np.random.default_rng(seed)
    centres = np.abs(generator.normal(size=(n_classes, n_features)))
    labels = np.repeat(np.arange(n_classes), counts)
    noise = generator.normal(size=(len(labels), n_features)) * spread
    return (centres[labels] + noise).astype(np.float32), labels


COLOURS = {"red": (200, 40, 30), "green": (30, 160, 60), "blue": (40, 60, 190), "yellow": (210, 200, 40)}


def picture(colour: str, seed: int) -> Image.Image:
    """A coarse pattern in shades of one colour."""
    generator = np.random.default_rng(seed)
    shades = generator.uniform(0.6, 1.15, (6, 6, 1)) * np.array(COLOURS[colour]) + generator.normal(0, 6, (6, 6, 3))
    return Image.fromarray(shades.clip(0, 255).astype(np.uint8)).resize((24, 20), Image.Resampling.NEAREST)


def save_pictures(folder: Path, colours: dict[str, int], first: int = 0) -> None:
    """So many pictures of each colour, as FOLDER/COLOUR-NUMBER.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for colour, count in colours.items():
        for place in range(count):
            picture(colour, 1000 * [*COLOURS].index(colour) + first + place).save(folder / f"{colour}-{place:03d}.png")


SUPPORT = ("red", "green", "blue")


def save_support_and_pile(folder: Path) -> None:
    """Three classes with two labelled pictures each in FOLDER/support, and fifteen in FOLDER/pile."""
    for colour in SUPPORT:
        save_pictures(folder / "support" / colour, {colour: 2}, first=900)
    save_pictures(folder / "pile", dict.fromkeys(SUPPORT, 5))
