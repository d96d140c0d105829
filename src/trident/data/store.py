"""A packed image store: one file with all decoded images, which opens at once and is memory-mapped.

The file is a safetensors file with a single uint8 tensor `images` (image, height, width, channel), sorted by class. A
store of features has float32 features of a frozen backbone instead, (image, feature). The class table (name, split,
first image, number of images), a fingerprint of the pixels and checksums of blocks of images are in the file's
metadata. The format is open and runs no code when read. The tensor can be copied to a GPU as it is.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np

from trident.errors import TridentError
from trident.files import MOST_DATA, open_regular
from trident.progress import Progress

PLACES = ("auto", "device", "host")
SPLITS = ("train", "val", "test")
BLOCK_BYTES = 64 * 2**20  # of images with one checksum: a block is a whole number of images
NO_DIGEST = "0" * 64  # a placeholder, replaced when all pixels are written
_FORMAT = "trident-store-1"
_TYPES: dict[str, Any] = {"U8": np.dtype(np.uint8), "F32": np.dtype("<f4")}  # by their names in safetensors
_MOST_HEADER = 2**25  # bytes; a class takes about 80, the checksum of a block of images 65
_READ_AT_ONCE = 4 * 2**20


@dataclass(frozen=True)
class ClassEntry:
    """One class of a store: its images are `images[start : start + count]`."""

    name: str
    split: str
    start: int
    count: int


class Checksums:
    """The SHA-256 of each block of a store file. A block is compared once, when the first of its images is read."""

    def __init__(self, path: Path, per_block: int, digests: Sequence[str]):
        self.path = path
        self.per_block = per_block  # images
        self.digests = tuple(digests)
        self._checked = np.zeros(len(self.digests), bool)
        self._locks = [Lock() for _ in self.digests]  # two threads do not hash the same block

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process compares for itself."""
        return Checksums, (self.path, self.per_block, self.digests)

    def check(self, images: np.ndarray, positions: np.ndarray) -> None:
        """Compare the blocks that these images are in, unless that was done before."""
        if self._checked.all():
            return
        for block in np.unique(positions // self.per_block).tolist():
            if not self._checked[block]:
                self._check(images, block)

    def check_all(self, images: np.ndarray, progress: Progress) -> None:
        for block in range(len(self.digests)):
            self._check(images, block)
            progress(block + 1, len(self.digests))

    def _check(self, images: np.ndarray, block: int) -> None:
        with self._locks[block]:
            if self._checked[block]:
                return
            first = block * self.per_block
            content = images[first : first + self.per_block]
            if hashlib.sha256(np.ascontiguousarray(content).data).hexdigest() != self.digests[block]:
                raise TridentError(
                    f"{self.path} is damaged: block {block + 1} of {len(self.digests)}, images {first} to "
                    f"{first + len(content) - 1}, does not match its checksum; make the store again with "
                    "'trident data prepare', or copy it again"
                )
            self._checked[block] = True


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


def new_hash(classes: Sequence[ClassEntry]) -> Any:
    """The beginning of a store's fingerprint; the images follow."""
    return hashlib.sha256(json.dumps([asdict(entry) for entry in classes], sort_keys=True).encode())


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
            if length > min(path.stat().st_size, _MOST_HEADER):
                raise ValueError("its header is longer than the file, or than that of a store can be")
            content = file.read(length)
        header = _checked_header(content)
        metadata = header["__metadata__"]
        if metadata.get("format") != _FORMAT:
            raise ValueError("it was not written by 'trident data prepare'")
        keys = ("dataset", "fingerprint", "features_of", "features_fingerprint")
        dataset, fingerprint, features_of, of_features = texts = [metadata.get(key, "") for key in keys]
        if not all(isinstance(text, str) for text in texts) or not fingerprint:
            raise ValueError("its metadata is not text")
        kind = "F32" if features_of else "U8"
        shape = _checked_shape(header["images"], kind, path.stat().st_size - 8 - length)
        classes = _checked_classes(json.loads(metadata["classes"]), shape[0])
        images = np.memmap(path, _TYPES[kind], "r", offset=8 + length, shape=shape)
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


def _checked_header(content: bytes) -> Any:
    """A store's header, which is compared with its own checksum first. Older versions wrote none."""
    if re.search(rb'"(header_checksum|block_checksums)"', content):
        recorded = re.search(rb'"header_checksum": "([0-9a-f]{64})"', content)
        if not recorded or digest_of_header(content, recorded[1].decode()) != recorded[1].decode():
            raise ValueError("its header does not match its checksum, so the file is damaged")
    return json.loads(content)


def _checked_shape(tensor: Any, kind: str, n_bytes: int) -> tuple[int, ...]:
    """The shape of a store's images or features, which must be of this type and fill so many bytes."""
    shape = tensor["shape"]
    if not isinstance(shape, list) or not all(type(length) is int and length > 0 for length in shape):
        raise ValueError("the shape of its images is not a list of lengths")
    square = len(shape) == 4 and shape[1] == shape[2] and shape[3] in (1, 3)
    if tensor["dtype"] != kind or not (len(shape) == 2 if kind == "F32" else square):
        raise ValueError("it holds neither square images in colour or grey nor features")
    needed = prod(shape) * _TYPES[kind].itemsize
    if needed != n_bytes or tensor["data_offsets"] != [0, needed]:
        raise ValueError("its images do not fill the rest of the file: it was cut or made longer")
    return tuple(shape)


def _checked_classes(table: Any, n_images: int) -> tuple[ClassEntry, ...]:
    """The class table of a store with so many images. Each class begins where the one before it ends."""
    if not isinstance(table, list) or not table:
        raise ValueError("it has no class table")
    classes, start = tuple(ClassEntry(**entry) for entry in table), 0
    for entry in classes:
        if not isinstance(entry.name, str) or entry.split not in SPLITS:
            others = f"a split other than {', '.join(SPLITS)}"
            raise ValueError(f"its class table has a class without a name, or in {others}")
        if type(entry.start) is not int or type(entry.count) is not int or entry.count < 1 or entry.start != start:
            raise ValueError("its class table does not fit its images: one class must begin where another ends")
        start += entry.count
    if start != n_images:
        raise ValueError(f"its class table does not fit its images: it has {start} images, and there are {n_images}")
    return classes


def digest_of_header(header: bytes, recorded: str) -> str:
    """The checksum of a header that contains the checksum `recorded`, which is replaced by zeros for that."""
    return hashlib.sha256(header.replace(recorded.encode(), NO_DIGEST.encode())).hexdigest()


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
    kind: dict[str, Any]
    if store.features_of:
        of, fingerprint = store.features_of, store.features_fingerprint
        kind = {"features_of": of, "features_fingerprint": fingerprint, "features": store.images.shape[1]}
    else:
        kind = {"image_size": store.image_size, "channels": store.image_channels}
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


class StoreWriter:
    """Writes a store into an open file. The header comes first; its checksums are zeros until the end."""

    def __init__(
        self, file: BinaryIO, dataset: str, classes: Sequence[ClassEntry], shape: Sequence[int], *features_of: str
    ):
        """`shape` is that of one image. `features_of`: if features come instead, their backbone's name, fingerprint."""
        self.file = file
        self.dataset = dataset
        self.classes = classes
        self.shape = tuple(shape)
        self.features_of = features_of
        self.kind = "F32" if features_of else "U8"
        self.type: np.dtype[Any] = _TYPES[self.kind]
        self.total = sum(entry.count for entry in classes)
        self.image_bytes: int = prod(self.shape) * self.type.itemsize
        self.per_block = max(1, BLOCK_BYTES // self.image_bytes)
        self.written = 0  # images
        self._all = new_hash(classes)
        self._block = hashlib.sha256()
        self._blocks: list[str] = []
        self._first_byte = self._write_header(NO_DIGEST, [NO_DIGEST] * -(-self.total // self.per_block))

    @property
    def running_digest(self) -> str:
        """SHA-256 over the class table and the images so far."""
        return str(self._all.copy().hexdigest())

    @property
    def size(self) -> int:
        """The size of the finished file in bytes."""
        return self._first_byte + self.total * self.image_bytes

    def add(self, image: np.ndarray) -> None:
        """Append the next image."""
        if image.shape != self.shape or image.dtype != self.type:
            given = f"{self.dataset}: image {self.written} is {image.dtype} {image.shape}"
            raise TridentError(f"{given}, expected {self.type} {self.shape}")
        pixels = np.ascontiguousarray(image)
        self.file.write(pixels.data)
        self._hash(pixels.data)

    def take_over(self, count: int) -> bool:
        """Read on to where `count` images are written already. False if the file ends before."""
        missing = (count - self.written) * self.image_bytes
        at_once = max(1, _READ_AT_ONCE // self.image_bytes) * self.image_bytes
        while missing > 0:
            content = self.file.read(min(missing, at_once))
            for start in range(0, len(content) // self.image_bytes * self.image_bytes, self.image_bytes):
                self._hash(memoryview(content)[start : start + self.image_bytes])
            if len(content) < min(missing, at_once):
                return False
            missing -= len(content)
        return True

    def cut(self) -> None:
        """Remove what the file holds after the images that are known."""
        self.file.seek(self._first_byte + self.written * self.image_bytes)
        self.file.truncate()

    def finish(self) -> None:
        """Write the checksums into the header, when all images are there."""
        if self.written != self.total:
            raise TridentError(f"{self.dataset}: {self.written} images came for a class table of {self.total}")
        if self.written % self.per_block:
            self._blocks.append(self._block.hexdigest())
        self._write_header(self._all.hexdigest(), self._blocks)

    def _hash(self, pixels: memoryview) -> None:
        self._all.update(pixels)
        self._block.update(pixels)
        self.written += 1
        if self.written % self.per_block == 0:
            self._blocks.append(self._block.hexdigest())
            self._block = hashlib.sha256()

    def _write_header(self, fingerprint: str, blocks: Sequence[str]) -> int:
        """The first byte after the header, whose length does not depend on the checksums."""
        metadata = {
            "format": _FORMAT,
            "dataset": self.dataset,
            "classes": json.dumps([asdict(entry) for entry in self.classes]),
            "images_per_block": str(self.per_block),
            "block_checksums": " ".join(blocks),
            "header_checksum": NO_DIGEST,
            "fingerprint": fingerprint,
        }
        metadata |= dict(zip(("features_of", "features_fingerprint"), self.features_of, strict=False))
        offsets = [0, self.total * self.image_bytes]
        images = {"dtype": self.kind, "shape": [self.total, *self.shape], "data_offsets": offsets}
        header = _padded({"__metadata__": metadata, "images": images})
        metadata["header_checksum"] = digest_of_header(header, NO_DIGEST)
        header = _padded({"__metadata__": metadata, "images": images})
        self.file.seek(0)
        self.file.write(struct.pack("<Q", len(header)) + header)
        return 8 + len(header)


def _padded(header: dict[str, Any]) -> bytes:
    """Multiples of 8 bytes, so that the images are aligned."""
    content = json.dumps(header).encode()
    if len(content) > _MOST_HEADER:
        raise TridentError(f"the header of the store would have {len(content)} bytes: {_MOST_HEADER} can be read again")
    return content + b" " * (-len(content) % 8)
