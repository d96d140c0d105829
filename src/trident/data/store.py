"""A packed image store: one file with all decoded images, which opens at once and is memory-mapped.

The file is a safetensors file with a single uint8 tensor `images` (image, height, width, channel), sorted by class. A
store of features has float32 features of a frozen backbone instead, (image, feature). The
class table (name, split, first image, number of images), a fingerprint of the pixels and checksums of blocks of images
are in the file's metadata. The format is open and runs no code when read. The tensor can be copied to a GPU as it is.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trident.data.checksums import Checksums
from trident.data.store_writer import (
    FORMAT,
    MOST_HEADER,
    TYPES,
    checked_classes,
    checked_header,
    checked_shape,
    new_hash,
)
from trident.data.store_writer import SPLITS as SPLITS
from trident.data.store_writer import ClassEntry as ClassEntry
from trident.errors import TridentError
from trident.files import MOST_DATA, open_regular

PLACES = ("auto", "device", "host")


@dataclass(frozen=True)
class ImageStore:
    """All images of a dataset, in memory or in a memory-mapped file."""

    dataset: str
    images: np.ndarray  # (image, height, width, channel) uint8; in a store of features (image, feature) float32
    classes: tuple[ClassEntry, ...]
    fingerprint: str  # SHA-256 over the class table and the pixels or features
    features_of: str = ""  # the backbone that computed the features, if it is a store of features
    checksums: Checksums | None = field(default=None, repr=False, compare=False)  # older files have none
    features_fingerprint: str = ""  # of that backbone; older files have none
    keep_on: str = "auto"  # of PLACES: whether tasks are drawn from a copy on the GPU; auto: if it fits there

    def check(self, positions: np.ndarray) -> None:
        """Compare these images with the file's checksums before they are used. Each block is compared only once."""
        if self.checksums is not None:
            self.checksums.check(self.images, positions)

    @property
    def image_size(self) -> int:
        return int(self.images.shape[1])

    @property
    def image_channels(self) -> int:
        return int(self.images.shape[3])

    def classes_of(self, split: str) -> tuple[ClassEntry, ...]:
        """The classes of one split. An empty split is an error."""
        entries = tuple(entry for entry in self.classes if entry.split == split)
        if not entries:
            present = sorted({entry.split for entry in self.classes})
            raise TridentError(f"{self.dataset} has no classes in split '{split}': it has {', '.join(present)}")
        return entries


def class_table(counts: Iterable[tuple[str, str, int]]) -> tuple[ClassEntry, ...]:
    """The class table for classes (name, split, number of images) in this order."""
    table, start = [], 0
    for name, split, count in counts:
        table.append(ClassEntry(name, split, start, count))
        start += count
    return tuple(table)


def positions_of(classes: Iterable[ClassEntry]) -> np.ndarray:
    """The positions of all images of these classes in the store."""
    return np.concatenate([np.arange(entry.start, entry.start + entry.count) for entry in classes])


def store_in_memory(dataset: str, images: np.ndarray, classes: Sequence[ClassEntry]) -> ImageStore:
    digest = new_hash(classes)
    digest.update(np.ascontiguousarray(images))
    return ImageStore(dataset, images, tuple(classes), digest.hexdigest())


def open_store(path: Path) -> ImageStore:
    """Open a store file. Only its header is read; pixels are read on access."""
    path = Path(path)
    if not path.is_file():
        what = f"{path} is a folder, not a store" if path.is_dir() else f"no store at {path}"
        raise TridentError(f"{what}: make one with 'trident data prepare'")
    try:
        with open_regular(path, MOST_DATA) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(path.stat().st_size, MOST_HEADER):
                raise ValueError("its header is longer than the file, or than that of a store can be")
            content = file.read(length)
        header = checked_header(content)
        metadata = header["__metadata__"]
        if metadata.get("format") != FORMAT:
            raise ValueError("it was not written by 'trident data prepare'")
        keys = ("dataset", "fingerprint", "features_of", "features_fingerprint")
        dataset, fingerprint, features_of, of_features = texts = [metadata.get(key, "") for key in keys]
        if not all(isinstance(text, str) for text in texts) or not fingerprint:
            raise ValueError("its metadata is not text")
        kind = "F32" if features_of else "U8"
        shape = checked_shape(header["images"], kind, path.stat().st_size - 8 - length)
        classes = checked_classes(json.loads(metadata["classes"]), shape[0])
        images = np.memmap(path, TYPES[kind], "r", offset=8 + length, shape=shape)
        checksums = _checksums(path, metadata, len(images))
        return ImageStore(dataset, images, classes, fingerprint, features_of, checksums, of_features)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise TridentError(f"{path} is not a trident store, or damaged: {str(error)[:200]}") from error


def _checksums(path: Path, metadata: dict[str, Any], n_images: int) -> Checksums | None:
    if not {"header_checksum", "images_per_block", "block_checksums"} & metadata.keys():
        return None  # written by an older version
    per_block, digests = int(metadata["images_per_block"]), metadata["block_checksums"].split()
    if per_block < 1 or len(digests) != -(-n_images // per_block):
        raise ValueError("its checksums do not fit its images")
    return Checksums(path, per_block, digests)


def describe(store: ImageStore) -> dict[str, Any]:
    """The values that `trident data show` prints."""
    splits = {}
    for split in SPLITS:
        counts = [entry.count for entry in store.classes if entry.split == split]
        if counts:
            splits[split] = {
                "classes": len(counts),
                "images": sum(counts),
                "fewest_images_in_a_class": min(counts),
                "most_images_in_a_class": max(counts),
            }
    kind = (
        {key: getattr(store, key) for key in ("features_of", "features_fingerprint")}
        | {"features": store.images.shape[1]}
        if store.features_of
        else {"image_size": store.image_size, "channels": store.image_channels}
    )
    return {
        "dataset": store.dataset,
        **kind,
        "images": len(store.images),
        "splits": splits,
        "fingerprint": store.fingerprint,
        "checksums": 0 if store.checksums is None else len(store.checksums.digests),
    }


def verify_fingerprint(store: ImageStore) -> bool:
    """Read every pixel and check that the fingerprint matches the class table and the images."""
    return store_in_memory(store.dataset, store.images, store.classes).fingerprint == store.fingerprint
