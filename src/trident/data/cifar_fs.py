"""CIFAR-FS (Bertinetto et al. 2019): CIFAR-100's classes in folders with split lists, or three pickles."""

from pathlib import Path

from trident.data.pickles import image_numbers, pickled_classes
from trident.data.readers import (
    ClassImages,
    Dataset,
    classes_by_split,
    ordered_classes,
    read_lines,
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
        classes = pickled_classes(source, _PICKLES, "data", "labels", image_numbers)  # they have no names of classes
        return Dataset("cifar-fs", ordered_classes(source, classes), image_size=32)
    raise TridentError(
        f"{source} is not CIFAR-FS: expected cifar100/ with data/ and splits/bertinetto/, or {', '.join(_PICKLES)}"
    )


def _from_folders(root: Path) -> list[ClassImages]:
    if not (root / "data").is_dir():
        raise TridentError(f"{root} has no folder data/ with the class folders")
    lists = root / "splits" / "bertinetto"
    files = zip(SPLITS, require_files(lists, _LISTS), strict=True)
    split_of = split_table((name, split, path) for split, path in files for name in read_lines(path))
    return classes_by_split(root / "data", split_of, lists)
