"""Any folder of class folders."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from trident.data.readers import (
    ClassImages,
    Dataset,
    class_folders,
    classes_by_split,
    image_files,
    ordered_classes,
    read_split_file,
    split_folders,
    subfolders,
)
from trident.errors import TridentError


def read_folder(source: Path, split_file: Path | None = None) -> Dataset:
    """Describe a folder of class folders. Split by `split_file`, by folders train, val and test, or by hash."""
    return Dataset(source.resolve().name, ordered_classes(source, _classes(source, split_file)), image_size=84)


def hashed_split(names: Iterable[str]) -> dict[str, str]:
    """Split classes 64 : 16 : 20, ordered by the SHA-256 of their names, with at least one in each part."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    n_val, n_test = max(1, round(0.16 * len(ordered))), max(1, round(0.2 * len(ordered)))
    parts = ["train"] * (len(ordered) - n_val - n_test) + ["val"] * n_val + ["test"] * n_test
    return dict(zip(ordered, parts, strict=True))


def _classes(source: Path, split_file: Path | None) -> list[ClassImages]:
    if split_file is not None:
        return classes_by_split(source, read_split_file(split_file), split_file)
    by_split = split_folders(source)
    if by_split:
        stray = [folder for folder in subfolders(source) if folder.name not in by_split]
        if stray:
            raise TridentError(f"{stray[0]} lies beside {next(iter(by_split))}/: put each class folder into a split")
        return [
            ClassImages(folder.name, split, image_files([folder]))
            for split, parent in by_split.items()
            for folder in subfolders(parent)
        ]
    folders = class_folders(source)
    if len(folders) < 3:
        raise TridentError(f"{source} has {len(folders)} class folders: at least 3 are needed for train, val and test")
    return classes_by_split(source, hashed_split(folders), source)
