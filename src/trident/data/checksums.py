"""Checksums: of a store's images, in blocks, so that damaged pixels are found when they are first read; of weights."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from trident.errors import TridentError
from trident.progress import Progress


def digest_of(text: str, tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over a text and named tensors, for files of weights and classifiers."""
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        value = np.ascontiguousarray(tensors[key])
        digest.update(f"{key} {value.dtype.str} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


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
