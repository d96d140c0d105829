"""What writing and reading a store file have in common."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

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
        found = re.search(rb'"header_checksum": "([0-9a-f]{64})"', content)
        if not found or digest_of_header(content, found[1].decode()) != found[1].decode():
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
