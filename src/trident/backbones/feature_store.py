"""Stores of features: a dataset's pictures, seen through a frozen backbone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trident.backbones.pretrained import BATCH, Pretrained
from trident.data.prepare import read_dataset
from trident.data.readers import Dataset
from trident.data.store import ImageStore, class_table, open_store, write_store
from trident.errors import TridentError
from trident.progress import Progress


def prepare_features(
    name: str,
    source: Path,
    target: Path,
    backbone: Pretrained,
    split_file: Path | None = None,
    progress: Progress | None = None,
) -> ImageStore:
    """Compute the features of every image of a dataset and write them to a store. After an error nothing is written."""
    dataset = read_dataset(name, source, split_file)
    if dataset.channels != 3:
        raise TridentError(f"{name} has grey images: backbones take colour images only")
    table = class_table((entry.name, entry.split, len(entry.sources)) for entry in dataset.classes)
    write_store(target, dataset.name, table, _features(dataset, backbone, progress), backbone.name)
    return open_store(target)


def _features(dataset: Dataset, backbone: Pretrained, progress: Progress | None) -> Iterator[np.ndarray]:
    sources = [source for entry in dataset.classes for source in entry.sources]
    for start in range(0, len(sources), BATCH):
        part = sources[start : start + BATCH]
        pixels = np.stack([backbone.decoded(source) for source in part])
        yield from backbone.features(pixels)
        if progress:
            progress(start + len(part), len(sources))
