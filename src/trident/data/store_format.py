"""What writing and reading a store file have in common."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FORMAT = "trident-store-1"
TYPES: dict[str, Any] = {"U8": np.dtype(np.uint8), "F32": np.dtype("<f4")}  # by their names in safetensors
NO_DIGEST = "0" * 64  # a placeholder, replaced when all pixels are written


@dataclass(frozen=True)
class ClassEntry:
    """One class of a store: its images are `images[start : start + count]`."""

    name: str
    split: str
    start: int
    count: int


def new_hash(classes: Sequence[ClassEntry]) -> Any:
    """The beginning of a store's fingerprint; the images follow."""
    return hashlib.sha256(json.dumps([asdict(entry) for entry in classes], sort_keys=True).encode())


def digest_of_header(header: bytes, recorded: str) -> str:
    """The checksum of a header that contains the checksum `recorded`, which is replaced by zeros for that."""
    return hashlib.sha256(header.replace(recorded.encode(), NO_DIGEST.encode())).hexdigest()
