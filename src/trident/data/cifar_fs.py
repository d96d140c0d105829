"""CIFAR-FS (Bertinetto et al. 2019): CIFAR-100's classes in folders with split lists, or three pickles."""

from pathlib import Path

from trident.data.pickles import PickleCache, image_numbers, load_fields, pixel_array
from trident.data.readers import (
    ClassImages,
    Dataset,
    class_folders,
    classes_by_split,
    ordered_classes,
    read_lines,
    refuse_unlisted,
    require_files,
    split_table,
)
from trident.data.store import SPLITS
from trident.errors import TridentError

_LISTS = [f"{split}.txt" for split in SPLITS]
_PICKLES = [f"CIFAR_FS_{split}.pickle" for split in SPLITS]


def read_cifar_fs(source: Path) -> Dataset:
    """Describe CIFAR-FS from the folder cifar100, its parent, or a folder with the three pickles."""
    for root in (source, source / "cifar100"):
        if (root / "splits" / "bertinetto").is_dir():
            return Dataset("cifar-fs", ordered_classes(root, _from_folders(root)), image_size=32)
    if any((source / name).is_file() for name in _PICKLES):
        return Dataset("cifar-fs", ordered_classes(source, _from_pickles(source)), image_size=32)
    raise TridentError(
        f"{source} is not CIFAR-FS: expected cifar100/ with data/ and splits/bertinetto/, or {', '.join(_PICKLES)}"
    )


def _from_folders(root: Path) -> list[ClassImages]:
    if not (root / "data").is_dir():
        raise TridentError(f"{root} has no folder data/ with the class folders")
    lists = root / "splits" / "bertinetto"
    files = zip(SPLITS, require_files(lists, _LISTS), strict=True)
    split_of = split_table((name, split, path) for split, path in files for name in read_lines(path))
    folders = class_folders(root / "data")
    refuse_unlisted(folders, split_of, lists)
    return classes_by_split(folders, split_of, lists, root / "data")


def _from_pickles(source: Path) -> list[ClassImages]:
    """The pickles have no class names, so a class is named by its split and number."""
    cache = PickleCache(lambda path: pixel_array(path, load_fields(path, "data")["data"]))
    classes: list[ClassImages] = []
    for split, path in zip(SPLITS, require_files(source, _PICKLES), strict=True):
        fields = load_fields(path, "data", "labels")
        n_images = len(pixel_array(path, fields["data"]))
        for label, numbers in image_numbers(path, fields["labels"], n_images).items():
            classes.append(ClassImages(f"{split}-{label:03d}", split, cache.sources(path, numbers)))
    return classes
