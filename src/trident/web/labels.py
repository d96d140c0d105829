"""The answer to a request: a label or an error for each picture of the pile."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from trident.data.images import key_of_pixels, naming_errors
from trident.errors import NotFiniteError
from trident.labelling.labeller import Labeller, label_pile
from trident.learning.checkpoint import Checkpoint
from trident.web.limits import RefusedError
from trident.web.request_queue import Check
from trident.web.uploads import Received, Upload
from trident.web.weight_store import WeightStore, describe


@dataclass(frozen=True)
class Task:
    """A valid request: every class has a readable picture."""

    weights: str
    checkpoint: Checkpoint
    classes: tuple[str, ...]
    pictures: np.ndarray  # (picture, size, size, channel) uint8
    labels: np.ndarray  # (picture,) int64
    upload: Upload

    def labeller(self, device: str) -> Labeller:
        return Labeller(self.checkpoint, self.classes, self.pictures, self.labels, device)

    def described(self) -> dict[str, Any]:
        return {
            "classes": list(self.classes),
            "weights": describe(self.weights, self.checkpoint),
            "labelled": _labelled(self.upload),
        }


def task_of(upload: Upload, available: WeightStore) -> Task:
    """Skips unreadable labelled pictures; it is an error if a class has no other."""
    readable = [(place, picture.pixels) for place, picture in upload.labelled if picture.pixels is not None]
    for place, name in enumerate(upload.classes):
        if all(place != other for other, _ in readable):
            bad = [picture.error for other, picture in upload.labelled if other == place]
            why = f"has no picture that can be read ({bad[0]})" if bad else "has no labelled picture"
            raise RefusedError(422, f"class '{name}' {why}", labelled=_labelled(upload))
    if not upload.pile:
        raise RefusedError(422, "there is no picture to label")
    weights, checkpoint = available.fitting(len(readable), len(upload.classes))
    pictures = np.stack([pixels for _, pixels in readable])
    labels = np.array([place for place, _ in readable], np.int64)
    return Task(weights, checkpoint, tuple(upload.classes), pictures, labels, upload)


def label(task: Task, device: str, check: Check) -> dict[str, Any]:
    """Label the pile. `check` is called after each chunk and raises if the work should stop."""
    labeller = task.labeller(device)
    check()
    # Includes unreadable pictures, as `trident predict` does, so that chunks and labels are the same.
    labelled = label_pile(labeller, [_Held(got) for got in task.upload.pile], lambda done, total: check())
    readable = [place for place, picture in enumerate(task.upload.pile) if picture.pixels is not None]
    if not np.isfinite(labelled.probabilities[readable]).all():
        raise NotFiniteError(f"weights {task.weights}: the prediction is not finite")
    return task.described() | {
        "pile": [
            {
                "name": picture.name,
                "error": picture.error,
                "ranking": None if picture.pixels is None else labelled.ranking(place),
            }
            for place, picture in enumerate(task.upload.pile)
        ]
    }


@dataclass(frozen=True)
class _Held:
    """An already decoded picture, for `label_pile`."""

    received: Received

    @property
    def name(self) -> str:
        return self.received.name

    def open(self) -> Image.Image:
        pixels = self.received.pixels
        if pixels is None:
            raise ValueError(self.received.error)
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def key(self) -> bytes:
        with naming_errors(self), self.open() as image:
            return key_of_pixels(image)


def _labelled(upload: Upload) -> list[dict[str, Any]]:
    return [
        {"name": picture.name, "class": upload.classes[place], "error": picture.error}
        for place, picture in upload.labelled
    ]
