"""Datasets in pickles, or folders with lists.

miniImageNet (Vinyals et al. 2016, split of Ravi & Larochelle 2017) has three common formats, and CIFAR-FS (Bertinetto
et al. 2019) has two. tieredImageNet (Ren et al. 2018) has for each split a pickle of PNG files and one of labels.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from trident.data.images import DatasetImage, ImageFile
from trident.data.readers import (
    ClassImages,
    Dataset,
    classes_by_split,
    file_inside,
    ordered_classes,
    read_lines,
    read_split_file,
    require_files,
    require_images,
    split_table,
)
from trident.data.store import SPLITS
from trident.data.unpickle import load_pickle
from trident.errors import TridentError

Images = Sequence[Any] | np.ndarray

_LISTS = [f"{split}.csv" for split in SPLITS]
_CACHES = [f"mini-imagenet-cache-{split}.pkl" for split in SPLITS]
_CIFAR_LISTS = [f"{split}.txt" for split in SPLITS]
_CIFAR_PICKLES = [f"CIFAR_FS_{split}.pickle" for split in SPLITS]


def read_mini_imagenet(source: Path, split_file: Path | None = None) -> Dataset:
    """Describe miniImageNet from `images/` with three lists, from three pickles, or from class folders.

    A given `split_file`, or split.json in `source`, is the split of class folders.
    """
    default_split = source / "split.json"
    if split_file is None and any((source / name).is_file() for name in _LISTS):
        classes = _from_lists(source)
    elif split_file is None and any((source / name).is_file() for name in _CACHES):
        classes = pickled_classes(source, _CACHES, "image_data", "class_dict", _class_table)
    elif split_file is not None or default_split.is_file():
        listed_in = split_file or default_split
        # Folders outside the split are fine: it uses 100 of the 1000 ImageNet classes.
        classes = classes_by_split(source, read_split_file(listed_in), listed_in, lists_all=False)
    else:
        raise TridentError(
            f"{source} has none of the forms of miniImageNet: images/ with {', '.join(_LISTS)}; "
            f"{', '.join(_CACHES)}; or class folders with split.json"
        )
    return Dataset("mini-imagenet", ordered_classes(source, classes), image_size=84)


def _from_lists(source: Path) -> list[ClassImages]:
    folder = source / "images"
    if not folder.is_dir():
        raise TridentError(f"{source} has lists of images but no folder images/ beside them")
    classes: list[ClassImages] = []
    class_of: dict[str, str] = {}
    for split, path in zip(SPLITS, require_files(source, _LISTS), strict=True):
        listed: dict[str, list[str]] = {}
        for file_name, label in _rows(path):
            if file_name in class_of:
                other = f"of class '{class_of[file_name]}' too" if class_of[file_name] != label else "listed twice"
                raise TridentError(f"{path}: image {file_name} of class '{label}' is {other}: list each image once")
            class_of[file_name] = label
            listed.setdefault(label, []).append(file_name)
        require_images((file_inside(folder, name, path) for names in listed.values() for name in names), path)
        for label, names in listed.items():
            classes.append(ClassImages(label, split, [ImageFile(folder / name) for name in sorted(names)]))
    return classes


def _rows(path: Path) -> list[tuple[str, str]]:
    """The rows (file name, label) of one list."""
    try:
        rows = list(csv.reader(read_lines(path)))
    except csv.Error as error:
        raise TridentError(f"{path} is not a CSV file: {error}") from error
    if not rows or rows[0] != ["filename", "label"]:
        raise TridentError(f"{path} does not begin with the line 'filename,label'")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != 2 or not all(row):
            raise TridentError(f"{path}, entry {number}: expected a file name and a label, got '{','.join(row)}'")
    return [(file_name, label) for file_name, label in rows[1:]]


def _class_table(path: Path, class_dict: Any, n_images: int) -> dict[str, list[int]]:
    """The image numbers of each class of one pickle, checked."""
    if not isinstance(class_dict, dict):
        raise TridentError(f"{path}: its class_dict is a {type(class_dict).__name__}, not a dict of image numbers")
    table: dict[str, list[int]] = {}
    class_of: dict[int, str] = {}
    for key, numbers in class_dict.items():
        name = as_text(path, key)
        try:
            table[name] = sorted(index(number) for number in numbers)
        except TypeError:
            raise TridentError(f"{path}: class '{name}' is not a list of image numbers") from None
        for number in table[name]:
            if not 0 <= number < n_images:
                raise TridentError(f"{path}: class '{name}' has image {number}, but there are {n_images} images")
            if number in class_of:
                other = f"class '{class_of[number]}' too" if class_of[number] != name else "the class twice"
                raise TridentError(f"{path}: image {number} of class '{name}' is in {other}: each image belongs to one")
            class_of[number] = name
    return table


def read_tiered_imagenet(source: Path) -> Dataset:
    """Describe tieredImageNet from its label pickles alone. The pickles of images have gigabytes each, and wait."""
    label_files = require_files(source, (f"{split}_labels.pkl" for split in SPLITS))
    image_files = require_files(source, (f"{split}_images_png.pkl" for split in SPLITS))
    n_images: dict[Path, int] = {}
    cache = PickleCache(lambda path: _load_images(path, n_images[path]))
    classes: list[ClassImages] = []
    for split, label_file, image_file in zip(SPLITS, label_files, image_files, strict=True):
        fields = load_fields(label_file, "label_specific")
        labels = fields["label_specific"]
        n_images[image_file] = len(labels) if isinstance(labels, np.ndarray | list | tuple) else 0
        grouped = image_numbers(label_file, labels, n_images[image_file])
        for label, name in _class_names(label_file, split, fields, grouped).items():
            classes.append(ClassImages(name, split, cache.sources(image_file, grouped.get(label, []))))
    return Dataset("tiered-imagenet", ordered_classes(source, classes), image_size=84)


def _class_names(path: Path, split: str, fields: dict[str, Any], grouped: dict[int, list[int]]) -> dict[int, str]:
    """The name of each label: its string if the pickle has one, else the split and the number."""
    strings = fields.get("label_specific_str")
    if strings is None:
        return {label: f"{split}-{label:03d}" for label in grouped}
    if not isinstance(strings, list | tuple | np.ndarray):
        raise TridentError(f"{path}: its label_specific_str is a {type(strings).__name__}, not a list of class names")
    names = [as_text(path, string) for string in strings]
    wrong = [label for label in grouped if not 0 <= label < len(names)]
    if wrong:
        raise TridentError(f"{path}: label_specific has {wrong[0]}, but label_specific_str names {len(names)} classes")
    return dict(enumerate(names))


def _load_images(path: Path, n_labels: int) -> Images:
    images = load_pickle(path)
    if not isinstance(images, list | tuple | np.ndarray):
        raise TridentError(f"{path} holds a {type(images).__name__}, not a list of PNG files")
    if len(images) != n_labels:
        raise TridentError(f"{path} has {len(images)} images for {n_labels} labels")
    return images


def read_cifar_fs(source: Path) -> Dataset:
    """Describe CIFAR-FS from the folder cifar100, its parent, or a folder with the three pickles."""
    for root in (source, source / "cifar100"):
        if (root / "splits" / "bertinetto").is_dir():
            return Dataset("cifar-fs", ordered_classes(root, _from_cifar_folders(root)), image_size=32)
    if any((source / name).is_file() for name in _CIFAR_PICKLES):
        classes = pickled_classes(source, _CIFAR_PICKLES, "data", "labels", image_numbers)  # without names of classes
        return Dataset("cifar-fs", ordered_classes(source, classes), image_size=32)
    forms = f"cifar100/ with data/ and splits/bertinetto/, or {', '.join(_CIFAR_PICKLES)}"
    raise TridentError(f"{source} is not CIFAR-FS: expected {forms}")


def _from_cifar_folders(root: Path) -> list[ClassImages]:
    if not (root / "data").is_dir():
        raise TridentError(f"{root} has no folder data/ with the class folders")
    lists = root / "splits" / "bertinetto"
    files = zip(SPLITS, require_files(lists, _CIFAR_LISTS), strict=True)
    split_of = split_table((name, split, path) for split, path in files for name in read_lines(path))
    return classes_by_split(root / "data", split_of, lists)


# Pickles. Only one is in memory at a time.


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
            name = key if isinstance(key, str) else f"{split}-{key:03d}"
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
