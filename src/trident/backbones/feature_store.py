"""Stores of features: a dataset's pictures, seen through a frozen backbone."""

import hashlib
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np

from trident.backbones.pretrained import BATCH, Pretrained
from trident.data.prepare import fingerprint_of_inputs, read_dataset
from trident.data.readers import Dataset
from trident.data.resuming import check_new_store, write_resumable_store
from trident.data.store import SPLITS, ImageStore, StoreWriter, class_table, open_store, positions_of
from trident.errors import TridentError
from trident.progress import Progress


def prepare_features(
    name: str,
    source: Path,
    target: Path,
    backbone: Pretrained,
    split_file: Path | None = None,
    progress: Progress | None = None,
    on_resume: Progress | None = None,
) -> ImageStore:
    """Compute the features of every image of a dataset and write them to a store. After an error nothing is written.

    A run that was killed or interrupted is resumed by the next one with the same arguments, which calls `on_resume`.
    """
    check_new_store(target)
    dataset = read_dataset(name, source, split_file)
    if dataset.channels != 3:
        raise TridentError(f"{name} has grey images: backbones take colour images only")
    write_resumable_store(
        target,
        lambda file: StoreWriter(
            file, dataset.name, dataset.table, (backbone.n_features,), backbone.name, backbone.network_fingerprint
        ),
        fingerprint_of_inputs(dataset, backbone.name, backbone.fingerprint, backbone.device),
        lambda first: _features(dataset, first, backbone, progress),
        on_resume,
    )
    return open_store(target)


def features_of_store(
    store: ImageStore, backbone: Pretrained, progress: Progress | None = None, splits: Sequence[str] = SPLITS
) -> ImageStore:
    """The features of every image of a store, or of some splits only, in memory."""
    stored, wanted = (store.image_size, store.image_channels), (backbone.facts.image_size, backbone.facts.channels)
    if stored != wanted:
        own, other = (f"{size}x{size} in {'grey' if n == 1 else 'colour'}" for size, n in (stored, wanted))
        raise TridentError(f"the images of {store.dataset} are {own}, but {backbone.name} takes {other}")
    classes = [entry for entry in store.classes if entry.split in splits]
    rows = positions_of(classes)
    features = np.empty((len(rows), backbone.n_features), np.float32)
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        store.check(part)
        features[start : start + len(part)] = backbone.features(np.asarray(store.images[part]))
        if progress:
            progress(start + len(part), len(rows))
    identity = f"{store.fingerprint} {backbone.fingerprint} {' '.join(splits)}"
    return ImageStore(
        store.dataset,
        features,
        class_table((entry.name, entry.split, entry.count) for entry in classes),
        hashlib.sha256(identity.encode()).hexdigest(),
        backbone.name,
        keep_on=store.keep_on,
        features_fingerprint=backbone.network_fingerprint,
    )


def _features(
    dataset: Dataset, first: int, backbone: Pretrained, progress: Progress | None
) -> Generator[np.ndarray, None, None]:
    sources = dataset.sources
    for start in range(first - first % BATCH, len(sources), BATCH):  # the same batches as without a stop
        part = sources[start : start + BATCH]
        pixels = np.stack([backbone.decoded(source) for source in part])
        yield from backbone.features(pixels)[max(0, first - start) :]
        if progress:
            progress(start + len(part), len(sources))
