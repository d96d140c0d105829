"""The format of a store file, and its writer: the header, the images in order, and their checksums."""

import hashlib
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, BinaryIO

import numpy as np

from trident.data.checksums import images_per_block
from trident.errors import TridentError

FORMAT = "trident-store-1"
TYPES: dict[str, Any] = {"U8": np.dtype(np.uint8), "F32": np.dtype("<f4")}  # by their names in safetensors
SPLITS = ("train", "val", "test")
MOST_HEADER = 2**25  # bytes; a class takes about 80, the checksum of a block of images 65
NO_DIGEST = "0" * 64  # a placeholder, replaced when all pixels are written


@dataclass(frozen=True)
class ClassEntry:
    """One class of a store: its images are `images[start : start + count]`."""

    name: str
    split: str
    start: int
    count: int


def checked_header(content: bytes) -> Any:
    """A store's header, which is compared with its own checksum first. Older versions wrote none."""
    if re.search(rb'"(header_checksum|block_checksums)"', content):
        recorded = re.search(rb'"header_checksum": "([0-9a-f]{64})"', content)
        if not recorded or digest_of_header(content, recorded[1].decode()) != recorded[1].decode():
            raise ValueError("its header does not match its checksum, so the file is damaged")
    return json.loads(content)


def checked_shape(tensor: Any, kind: str, n_bytes: int) -> tuple[int, ...]:
    """The shape of a store's images or features, which must be of this type and fill so many bytes."""
    shape = tensor["shape"]
    if not isinstance(shape, list) or not all(type(length) is int and length > 0 for length in shape):
        raise ValueError("the shape of its images is not a list of lengths")
    square = len(shape) == 4 and shape[1] == shape[2] and shape[3] in (1, 3)
    if tensor["dtype"] != kind or not (len(shape) == 2 if kind == "F32" else square):
        raise ValueError("it holds neither square images in colour or grey nor features")
    needed = prod(shape) * TYPES[kind].itemsize
    if needed != n_bytes or tensor["data_offsets"] != [0, needed]:
        raise ValueError("its images do not fill the rest of the file: it was cut or made longer")
    return tuple(shape)


def checked_classes(table: Any, n_images: int) -> tuple[ClassEntry, ...]:
    """The class table of a store with so many images. Each class begins where the one before it ends."""
    if not isinstance(table, list) or not table:
        raise ValueError("it has no class table")
    classes = tuple(ClassEntry(**entry) for entry in table)
    start = 0
    for entry in classes:
        if not isinstance(entry.name, str) or entry.split not in SPLITS:
            raise ValueError(
                f"its class table has a class without a name, or in a split other than {', '.join(SPLITS)}"
            )
        if type(entry.start) is not int or type(entry.count) is not int or entry.count < 1 or entry.start != start:
            raise ValueError("its class table does not fit its images: one class must begin where another ends")
        start += entry.count
    if start != n_images:
        raise ValueError(f"its class table does not fit its images: it has {start} images, and there are {n_images}")
    return classes


def new_hash(classes: Sequence[ClassEntry]) -> Any:
    """The beginning of a store's fingerprint; the images follow."""
    return hashlib.sha256(json.dumps([asdict(entry) for entry in classes], sort_keys=True).encode())


def digest_of_header(header: bytes, recorded: str) -> str:
    """The checksum of a header that contains the checksum `recorded`, which is replaced by zeros for that."""
    return hashlib.sha256(header.replace(recorded.encode(), NO_DIGEST.encode())).hexdigest()


_READ_AT_ONCE = 4 * 2**20


class StoreWriter:
    """Writes a store into an open file.

    The header comes first but contains the checksums, so it is written twice: with zeros, and at the end with them.
    """

    def __init__(
        self, file: BinaryIO, dataset: str, classes: Sequence[ClassEntry], shape: Sequence[int], *features_of: str
    ):
        """`shape` is that of one image. `features_of`: if features come instead, their backbone's name, fingerprint."""
        self.file = file
        self.dataset = dataset
        self.classes = classes
        self.shape = tuple(shape)
        self.features_of = features_of
        self.type: np.dtype[Any] = TYPES["F32" if features_of else "U8"]
        self.total = sum(entry.count for entry in classes)
        self.image_bytes = int(np.prod(self.shape)) * self.type.itemsize
        self.per_block = images_per_block(self.image_bytes)
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
        return int(self._first_byte + self.total * self.image_bytes)

    def add(self, image: np.ndarray) -> None:
        """Append the next image."""
        if image.shape != self.shape or image.dtype != self.type:
            raise TridentError(
                f"{self.dataset}: image {self.written} is {image.dtype} {image.shape}, "
                f"expected {self.type} {self.shape}"
            )
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
            "format": FORMAT,
            "dataset": self.dataset,
            "classes": json.dumps([asdict(entry) for entry in self.classes]),
            "images_per_block": str(self.per_block),
            "block_checksums": " ".join(blocks),
            "header_checksum": NO_DIGEST,
            "fingerprint": fingerprint,
        }
        metadata |= dict(zip(("features_of", "features_fingerprint"), self.features_of, strict=False))
        kind, n_bytes = "F32" if self.features_of else "U8", self.total * self.image_bytes
        images = {"dtype": kind, "shape": [self.total, *self.shape], "data_offsets": [0, n_bytes]}
        header = _padded({"__metadata__": metadata, "images": images})
        metadata["header_checksum"] = digest_of_header(header, NO_DIGEST)
        header = _padded({"__metadata__": metadata, "images": images})
        self.file.seek(0)
        self.file.write(struct.pack("<Q", len(header)) + header)
        return 8 + len(header)


def _padded(header: dict[str, Any]) -> bytes:
    """Multiples of 8 bytes, so that the images are aligned."""
    content = json.dumps(header).encode()
    if len(content) > MOST_HEADER:
        raise TridentError(f"the header of the store would have {len(content)} bytes: {MOST_HEADER} can be read again")
    return content + b" " * (-len(content) % 8)


def check_space(file: BinaryIO, name: object, n_bytes: int) -> None:
    """Check that the file can grow to this size."""
    free = os.fstatvfs(file.fileno())
    have = free.f_bavail * free.f_frsize + os.fstat(file.fileno()).st_size
    if have < n_bytes:
        raise TridentError(f"cannot write {name}: it needs {n_bytes / 1e6:.1f} MB, and {have / 1e6:.1f} MB are free")
