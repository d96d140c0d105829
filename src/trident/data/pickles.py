"""Images in pickles. Only one pickle is in memory at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trident.data.images import DatasetImage
from trident.data.readers import ClassImages, require_files
from trident.data.store import SPLITS
from trident.data.unpickle import load_pickle
from trident.errors import TridentError

Images = Sequence[Any] | np.ndarray


def load_fields(path: Path, *names: str) -> dict[str, Any]:
    """Read a pickle that must be a dict with these fields."""
    content = load_pickle(path)
    if not isinstance(content, Mapping):
        raise TridentError(f"{path} holds a {type(content).__name__}, not a dict with {' and '.join(names)}")
    missing = [name for name in names if name not in content]
    if missing:
        raise TridentError(f"{path} has no '{missing[0]}': expected a dict with {' and '.join(names)}")
    return dict(content)


def pixel_array(path: Path, images: Any) -> np.ndarray:
    """Check that a pickle's images are one array of RGB pixels."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        kind = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise TridentError(f"{path}: its images are {kind}, expected one uint8 array (image, height, width, 3)")
    return images


def as_text(path: Path, name: Any) -> str:
    """A class name, which numpy and Python 2 may have stored as bytes. A whole number is fine too."""
    if isinstance(name, bytes):
        return name.decode("utf-8", "replace")
    if not isinstance(name, str | np.integer) and not (isinstance(name, int) and abs(name) < 2**63):
        raise TridentError(f"{path}: the name of a class is a {type(name).__name__}, expected text")
    return str(name)


def image_numbers(path: Path, labels: Any, n_images: int) -> dict[int, list[int]]:
    """Group image numbers by label. `labels` has one integer for each image."""
    listed = isinstance(labels, list | tuple) and all(isinstance(label, int | np.integer) for label in labels)
    array = np.asarray(labels) if listed or isinstance(labels, np.ndarray) else np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TridentError(f"{path}: its labels are not a list of whole numbers")
    if len(array) != n_images:
        raise TridentError(f"{path}: {len(array)} labels for {n_images} images")
    grouped: dict[int, list[int]] = {}
    for number, label in enumerate(array.tolist()):
        grouped.setdefault(label, []).append(number)
    return grouped


def class_name(split: str, label: int) -> str:
    """The name of a class for which the pickle has none."""
    return f"{split}-{label:03d}"


def pickled_classes(
    source: Path,
    names: Sequence[str],
    images: str,
    table: str,
    numbers_of: Callable[[Path, Any, int], Mapping[Any, Sequence[int]]],
) -> list[ClassImages]:
    """The classes of a pickle for each split, which holds a dict with pixels, `images`, and their classes, `table`.

    `numbers_of` takes a path, the table and the number of images, and returns the image numbers of each class, by name
    or label. Each pickle is read twice, now and later for its images, so that one is in memory at a time.
    """
    cache = PickleCache(lambda path: pixel_array(path, load_fields(path, images)[images]))
    classes: list[ClassImages] = []
    for split, path in zip(SPLITS, require_files(source, names), strict=True):
        fields = load_fields(path, images, table)
        n_images = len(pixel_array(path, fields[images]))
        for key, numbers in numbers_of(path, fields[table], n_images).items():
            name = key if isinstance(key, str) else class_name(split, key)
            classes.append(ClassImages(name, split, cache.sources(path, numbers)))
    return classes


class PickleCache:
    """Caches the images of the last pickle, so that only one split is in memory."""

    def __init__(self, load: Callable[[Path], Images]) -> None:
        self._load = load
        self._path: Path | None = None
        self._images: Images = ()

    def images(self, path: Path) -> Images:
        if path != self._path:
            self._path, self._images = None, ()  # free one before loading the next
            self._images = self._load(path)
            self._path = path
        return self._images

    def sources(self, path: Path, numbers: Sequence[int]) -> list["PickledImage"]:
        return [PickledImage(self, path, number) for number in numbers]


@dataclass(frozen=True, slots=True)
class PickledImage(DatasetImage):
    """One image of a pickle: either its pixels, or an image file packed into an array of bytes."""

    cache: PickleCache
    file: Path = field()
    number: int = field()

    @property
    def name(self) -> str:
        return f"{self.file}: image {self.number}"

    def content(self) -> bytes | np.ndarray:
        image = self.cache.images(self.file)[self.number]
        if isinstance(image, np.ndarray) and image.dtype == np.uint8:
            return image if image.ndim == 3 else image.tobytes()
        if not isinstance(image, bytes):
            raise ValueError(f"it is a {type(image).__name__}, not an array of bytes")
        return image
