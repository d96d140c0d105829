"""Writes the content of a store file: its header, the images in order, and their checksums."""

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from trident.data.checksums import images_per_block
from trident.data.store_format import FORMAT, MOST_HEADER, NO_DIGEST, TYPES, ClassEntry, digest_of_header, new_hash
from trident.errors import TridentError

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
