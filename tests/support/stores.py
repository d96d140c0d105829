"""Store files of made-up images."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from trident.data.store import ClassEntry, StoreWriter
from trident.files import atomic_file


def write_store(
    path: Path, dataset: str, classes: Sequence[ClassEntry], images: Iterable[np.ndarray], *features_of: str
) -> None:
    """Stream images (height, width, channel) uint8, in class-table order, into a store file.

    `features_of`: the backbone's name and fingerprint, if features (feature,) float32 come instead of images.
    """
    stream = iter(images)
    first = next(stream)
    with atomic_file(path) as file:
        writer = StoreWriter(file, dataset, classes, first.shape, *features_of)
        writer.add(first)
        for image in stream:
            writer.add(image)
        writer.finish()
