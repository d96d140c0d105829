"""Shared by all readers: the `Dataset` they return, functions for folders and split files, and the reader of folders.

A reader checks all that can be checked without decoding an image.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trident.data.images import IMAGE_SUFFIXES, DatasetImage, ImageFile
from trident.data.store import SPLITS, ClassEntry, class_table
from trident.errors import TridentError
from trident.files import read_regular

_MOST_TEXT = 2**25  # bytes of a list; miniImageNet's longest has 1.2 MB


@dataclass(frozen=True)
class ClassImages:
    """One class and its images, not decoded yet."""

    name: str
    split: str
    sources: Sequence[DatasetImage]


@dataclass(frozen=True)
class Dataset:
    """A dataset on disk: its classes, sorted by split and name, and the format to store its images in."""

    name: str
    classes: tuple[ClassImages, ...]
    image_size: int  # the default
    channels: int = 3
    inverted: bool = False  # whether to swap dark and bright

    @property
    def sources(self) -> list[DatasetImage]:
        """All images, in the order of the store."""
        return [source for entry in self.classes for source in entry.sources]

    @property
    def table(self) -> tuple[ClassEntry, ...]:
        return class_table((entry.name, entry.split, len(entry.sources)) for entry in self.classes)


def ordered_classes(where: Path, classes: Iterable[ClassImages]) -> tuple[ClassImages, ...]:
    """Sort classes by split and name. Check that each has images, a name of its own, and one split only."""
    ordered = tuple(sorted(classes, key=lambda entry: (SPLITS.index(entry.split), entry.name)))
    for entry in ordered:
        if not entry.sources:
            raise TridentError(f"{where}: class '{entry.name}' of split {entry.split} has no images")
    if not ordered:
        raise TridentError(f"{where}: there is not one class of images in it")
    split_table((entry.name, entry.split, where) for entry in ordered)
    return ordered


def require_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """The paths of files. A missing one is an error."""
    paths = [folder / name for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise TridentError(f"{folder} has no {missing[0]}: expected {', '.join(path.name for path in paths)}")
    refuse_links_outside(folder, paths)
    return paths


def file_inside(folder: Path, name: str, listed_in: Path) -> Path:
    """The file that a list names. A list may name files in the folder only."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise TridentError(f"{listed_in}: {name[:200]} lies outside the folder {folder}")
    return folder / name


def refuse_links_outside(root: Path, files: Iterable[Path]) -> None:
    """Check that no link leads out of the folder: what lies elsewhere is not a part of the dataset."""
    top = root.resolve()
    is_inside = cache(lambda folder: folder.resolve().is_relative_to(top))  # resolving takes time
    for file in files:
        if not is_inside(file.parent) or (file.is_symlink() and not file.resolve().is_relative_to(top)):
            todo = "copy what it leads to, or prepare that folder instead"
            raise TridentError(f"{file} leads out of {root} through a link: {todo}")


def require_images(paths: Iterable[Path], listed_in: Path) -> None:
    """Check that the images of a list exist."""
    missing = [path for path in paths if not path.is_file()]
    if missing:
        count = f"{len(missing)} images" if len(missing) > 1 else "1 image"
        raise TridentError(f"{count} listed in {listed_in} cannot be found, the first is {missing[0]}")


def read_lines(path: Path) -> list[str]:
    """The non-blank lines of a text file."""
    try:
        text = read_regular(path, _MOST_TEXT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TridentError(f"{path} is not a text file in UTF-8: save it as UTF-8") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def subfolders(folder: Path) -> list[Path]:
    """The subfolders of a folder, sorted by name, without hidden ones and __MACOSX."""
    inside = (path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX")) and path.is_dir())
    return sorted(inside, key=lambda path: path.name)


def image_files(folders: Iterable[Path], suffixes: frozenset[str] = IMAGE_SUFFIXES) -> list[ImageFile]:
    """The images directly in these folders, sorted by name. Hidden and other files are skipped."""
    paths = [
        path
        for folder in folders
        for path in folder.iterdir()
        if path.suffix.lower() in suffixes and not path.name.startswith(".") and path.is_file()
    ]
    return [ImageFile(path) for path in sorted(paths, key=lambda path: (path.name, path))]


def split_folders(root: Path) -> dict[str, Path]:
    """The folders train, val and test, as far as they exist and have class folders."""
    return {name: root / name for name in SPLITS if (root / name).is_dir() and subfolders(root / name)}


def class_folders(root: Path) -> dict[str, list[Path]]:
    """The folders of each class: directly in `root`, or joined by name from its train, val and test."""
    parents = list(split_folders(root).values()) or [root]
    by_name: dict[str, list[Path]] = {}
    for parent in parents:
        for folder in subfolders(parent):
            by_name.setdefault(folder.name, []).append(folder)
    if not by_name:
        raise TridentError(f"{root} has no class folders: expected {root}/CLASS/IMAGE.jpg")
    return by_name


def read_split_file(path: Path) -> dict[str, str]:
    """The split of each class, from a JSON file {"train": [class, ...], "val": [...], "test": [...]}."""
    try:
        content = json.loads(read_regular(path, _MOST_TEXT).decode("utf-8-sig"))
    except OSError as error:
        raise TridentError(f"cannot read the split file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TridentError(f"the split file {path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not content or not set(content) <= set(SPLITS):
        raise TridentError(f'the split file {path} is not of the form {{"train": [...], "val": [...], "test": [...]}}')
    for split, names in content.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TridentError(f"the split file {path} has no list of class names for {split}")
    return split_table((name, split, path) for split, names in content.items() for name in names)


def split_table(listed: Iterable[tuple[str, str, Path]]) -> dict[str, str]:
    """The split of each class, from names, splits and the files that list them. Each class is listed once."""
    split_of: dict[str, str] = {}
    for name, split, path in listed:
        if name in split_of:
            where = f"in both {split_of[name]} and {split}" if split_of[name] != split else f"twice in {split}"
            raise TridentError(f"{path}: class '{name}' is {where}: each class belongs to one split")
        split_of[name] = split
    return split_of


def classes_by_split(
    root: Path, split_of: Mapping[str, str], listed_in: Path, lists_all: bool = True
) -> list[ClassImages]:
    """The classes of a split, with the images in their folders. `lists_all`: other class folders are an error."""
    folders = class_folders(root)
    unlisted = [name for name in folders if lists_all and name not in split_of]
    if unlisted:
        raise TridentError(f"{listed_in} has no split for class '{unlisted[0]}': list each class folder in one split")
    missing = [name for name in split_of if name not in folders]
    if missing:
        count = f"{len(missing)} classes have" if len(missing) > 1 else "1 class has"
        raise TridentError(f"{listed_in}: {count} no folder in {root}, the first is '{missing[0]}'")
    return [ClassImages(name, split, image_files(folders[name])) for name, split in split_of.items()]


def read_folder(source: Path, split_file: Path | None = None) -> Dataset:
    """Describe a folder of class folders. Split by `split_file`, by folders train, val and test, or by hash."""
    classes = _classes_of_folder(source, split_file)
    return Dataset(source.resolve().name, ordered_classes(source, classes), image_size=84)


def hashed_split(names: Iterable[str]) -> dict[str, str]:
    """Split classes 64 : 16 : 20, ordered by the SHA-256 of their names, with at least one in each part."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    n_val, n_test = max(1, round(0.16 * len(ordered))), max(1, round(0.2 * len(ordered)))
    parts = ["train"] * (len(ordered) - n_val - n_test) + ["val"] * n_val + ["test"] * n_test
    return dict(zip(ordered, parts, strict=True))


def _classes_of_folder(source: Path, split_file: Path | None) -> list[ClassImages]:
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
