"""CUB-200-2011 (Wah et al. 2011) with the split of Chen et al. 2019."""

import re
from pathlib import Path

from trident.data.images import ImageFile
from trident.data.readers import (
    ClassImages,
    Dataset,
    class_folders,
    file_inside,
    image_files,
    ordered_classes,
    read_lines,
    require_files,
    require_images,
    split_folders,
)
from trident.errors import TridentError

_LISTS = ("images.txt", "image_class_labels.txt", "classes.txt")
_MOST_DIGITS = 9  # of a number in a list
_NUMBERED_NAME = re.compile(r"(\d{3})\..+")


def read_cub(source: Path) -> Dataset:
    """Describe CUB from its own lists, or from class folders in train/ and test/, as in a common mirror.

    The mirror splits the images of each class. Both parts are joined, and split by class as with the lists.
    """
    for root in (source, source / "CUB_200_2011"):
        if any((root / name).is_file() for name in _LISTS):
            return Dataset("cub", ordered_classes(root, _from_lists(root)), image_size=84)
        if split_folders(root):
            return Dataset("cub", ordered_classes(root, _from_folders(root)), image_size=84)
    raise TridentError(f"{source} is not CUB_200_2011: expected {', '.join(_LISTS)} and images/, or train/ and test/")


def chen_split(index: int) -> str:
    """The split of the class with this number, from 0."""
    return "train" if index % 2 == 0 else "val" if index % 4 == 1 else "test"


def _from_lists(root: Path) -> list[ClassImages]:
    images_path, labels_path, classes_path = require_files(root, _LISTS)
    class_names = _numbered(classes_path)
    image_names = _numbered(images_path)
    labels = _numbered(labels_path)
    for path, numbers, other in ((labels_path, labels, images_path), (images_path, image_names, labels_path)):
        unknown = (labels.keys() | image_names.keys()) - numbers.keys()
        if unknown:
            raise TridentError(f"{path} has no line for image {min(unknown)} of {other}")
    paths: dict[int, list[Path]] = {}
    for image, name in image_names.items():
        label = int(labels[image]) if labels[image].isdecimal() and len(labels[image]) <= _MOST_DIGITS else 0
        if label not in class_names:
            of_class = f"image {image} has class {labels[image][:80]}"
            raise TridentError(f"{labels_path}: {of_class}, which is not in {classes_path}")
        paths.setdefault(label, []).append(file_inside(root / "images", name, images_path))
    require_images((path for listed in paths.values() for path in listed), images_path)
    # Classes without images are omitted: classes.txt lists all 200 even if only some are present.
    return [
        ClassImages(class_names[label], chen_split(label - 1), [ImageFile(path) for path in sorted(listed)])
        for label, listed in paths.items()
    ]


def _numbered(path: Path) -> dict[int, str]:
    """Read one of CUB's lists, whose lines are 'number text'."""
    entries: dict[int, str] = {}
    for line in read_lines(path):
        number, _, text = line.partition(" ")
        if not number.isdecimal() or len(number) > _MOST_DIGITS or not text:
            raise TridentError(f"{path}: expected a number and a name in each line, got '{line[:80]}'")
        if int(number) in entries:
            raise TridentError(f"{path}: number {number} is there twice")
        entries[int(number)] = text.strip()
    return entries


def _from_folders(root: Path) -> list[ClassImages]:
    classes = []
    for name, folders in class_folders(root).items():
        match = _NUMBERED_NAME.fullmatch(name)
        if not match or int(match[1]) == 0:
            raise TridentError(f"{folders[0]} is not named like a class of CUB: expected 001.Black_footed_Albatross")
        classes.append(ClassImages(name, chen_split(int(match[1]) - 1), image_files(folders)))
    return classes
