"""A packed image store: one file with all decoded images, which opens at once and is memory-mapped.

The file is a safetensors file with a single uint8 tensor `images` (image, height, width, channel), sorted by class. A
store of features has float32 features of a frozen backbone instead, (image, feature). The
class table (name, split, first image, number of images) and a fingerprint of the pixels are JSON in the file's
metadata. The format is open and runs no code when read. The tensor can be copied to a GPU as it is.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trident.errors import TridentError
from trident.files import atomic_file

SPLITS = ("train", "val", "test")
_FORMAT = "trident-store-1"
_TYPES: dict[str, Any] = {"U8": np.dtype(np.uint8), "F32": np.dtype("<f4")}  # by their names in safetensors
_NO_FINGERPRINT = "0" * 64  # a placeholder, replaced when all pixels are written


@dataclass(frozen=True)
class ClassEntry:
    """One class of a store: its images are `images[start : start + count]`."""

    name: str
    split: str
    start: int
    count: int


@dataclass(frozen=True)
class ImageStore:
    """All images of a dataset, in memory or in a memory-mapped file."""

    dataset: str
    images: np.ndarray  # (image, height, width, channel) uint8; in a store of features (image, feature) float32
    classes: tuple[ClassEntry, ...]
    fingerprint: str  # SHA-256 over the class table and the pixels or features
    features_of: str = ""  # the backbone that computed the features, if it is a store of features

    @property
    def image_size(self) -> int:
        return int(self.images.shape[1])

    @property
    def image_channels(self) -> int:
        return int(self.images.shape[3])

    def classes_of(self, split: str) -> tuple[ClassEntry, ...]:
        """The classes of one split. An empty split is an error."""
        found = tuple(entry for entry in self.classes if entry.split == split)
        if not found:
            present = sorted({entry.split for entry in self.classes})
            raise TridentError(f"{self.dataset} has no classes in split '{split}': it has {', '.join(present)}")
        return found


def class_table(counts: Iterable[tuple[str, str, int]]) -> tuple[ClassEntry, ...]:
    """The class table for classes (name, split, number of images) in this order."""
    table, start = [], 0
    for name, split, count in counts:
        table.append(ClassEntry(name, split, start, count))
        start += count
    return tuple(table)


def _new_hash(classes: Sequence[ClassEntry]) -> Any:
    return hashlib.sha256(json.dumps([asdict(entry) for entry in classes], sort_keys=True).encode())


def store_in_memory(dataset: str, images: np.ndarray, classes: Sequence[ClassEntry]) -> ImageStore:
    digest = _new_hash(classes)
    digest.update(np.ascontiguousarray(images))
    return ImageStore(dataset, images, tuple(classes), digest.hexdigest())


def write_store(
    path: Path, dataset: str, classes: Sequence[ClassEntry], images: Iterable[np.ndarray], features_of: str = ""
) -> None:
    """Stream images (height, width, channel) uint8, in class-table order, into a store file.

    `features_of`: the backbone's name, if features (feature,) float32 come instead of images.
    """
    kind = "F32" if features_of else "U8"
    total = sum(entry.count for entry in classes)
    stream = iter(images)
    try:
        first = next(stream)
    except StopIteration:
        raise TridentError(f"{dataset}: there is not one image to store") from None
    shape = first.shape
    n_bytes = total * first.nbytes
    table = [asdict(entry) for entry in classes]
    metadata = {"format": _FORMAT, "dataset": dataset, "classes": json.dumps(table), "fingerprint": _NO_FINGERPRINT}
    metadata |= {"features_of": features_of} if features_of else {}
    header = {
        "__metadata__": metadata,
        "images": {"dtype": kind, "shape": [total, *shape], "data_offsets": [0, n_bytes]},
    }
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    digest = _new_hash(classes)
    with atomic_file(path) as file:
        free = os.statvfs(path.parent)
        if free.f_bavail * free.f_frsize < n_bytes + len(header_bytes):
            have = free.f_bavail * free.f_frsize
            raise TridentError(
                f"cannot write {path}: it needs {n_bytes / 1e6:.1f} MB, and {have / 1e6:.1f} MB are free"
            )
        file.write(struct.pack("<Q", len(header_bytes)) + header_bytes)
        written, image = 0, first
        while True:
            if image.shape != shape or image.dtype != _TYPES[kind]:
                raise TridentError(
                    f"{dataset}: image {written} is {image.dtype} {image.shape}, the first was {_TYPES[kind]} {shape}"
                )
            pixels = np.ascontiguousarray(image)
            digest.update(pixels)
            file.write(pixels.data)
            written += 1
            following = next(stream, None)
            if following is None:
                break
            image = following
        if written != total:
            raise TridentError(f"{dataset}: {written} images came for a class table of {total}")
        position = header_bytes.rindex(_NO_FINGERPRINT.encode())
        file.seek(8 + position)
        file.write(digest.hexdigest().encode())


def open_store(path: Path) -> ImageStore:
    """Open a store file. Only its header is read; pixels are read on access."""
    path = Path(path)
    if not path.is_file():
        raise TridentError(f"no store at {path}: make one with 'trident data prepare'")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(path.stat().st_size, 1 << 30):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        metadata = header["__metadata__"]
        if metadata.get("format") != _FORMAT:
            raise ValueError("it was not written by 'trident data prepare'")
        classes = tuple(ClassEntry(**entry) for entry in json.loads(metadata["classes"]))
        shape = tuple(header["images"]["shape"])
        features_of = str(metadata.get("features_of", ""))
        kind = _TYPES["F32" if features_of else "U8"]
        images = np.memmap(path, kind, "r", offset=8 + length, shape=shape)
        if len(shape) != (2 if features_of else 4) or shape[0] != sum(entry.count for entry in classes):
            raise ValueError("its class table does not fit its images")
        return ImageStore(str(metadata["dataset"]), images, classes, str(metadata["fingerprint"]), features_of)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise TridentError(f"{path} is not a trident store: {error}") from error
