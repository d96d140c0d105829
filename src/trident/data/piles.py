"""A pile of pictures to label: a folder, a list of paths, tar archives or Parquet files."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trident.data.images import IMAGE_SUFFIXES, ImageFile, ImageSource
from trident.data.parquet import PARQUET_SUFFIX, parquet_pictures
from trident.data.pictures import find_pictures, listed_pictures
from trident.data.tars import TAR_SUFFIXES, tar_pictures
from trident.errors import TridentError

KINDS = "a folder of pictures, a text file with one path on each line, or tar archives or Parquet files"

Pile = tuple[Sequence[ImageSource], dict[str, str]]  # the pictures, and a message for each path that cannot be read


def find_pile(query: Path, without: Iterable[Path] = ()) -> Pile:
    """The pictures of a pile. In a folder with pictures, archives are not looked into."""
    if query.is_file():
        return _in_file(query)
    if not query.is_dir():
        raise TridentError(f"there is no such folder or file; it must be {KINDS}")
    pictures, unread = find_pictures(query, without)
    if pictures:
        return pictures, unread
    tars, tables = (_files(query, suffixes) for suffixes in (TAR_SUFFIXES, (PARQUET_SUFFIX,)))
    if tars and tables:
        raise TridentError(f"it has both tar archives and Parquet files ({tars[0]}, {tables[0]}): give one kind")
    if not tars and not tables:
        return pictures, unread
    archived, more = tar_pictures(tars) if tars else parquet_pictures(tables)
    return archived, unread | more


def apart_from(
    pile: Sequence[ImageSource], labelled: Iterable[ImageSource], folders: Iterable[Path]
) -> Sequence[ImageSource]:
    """The pictures of a pile without those that are labelled, or in some folders, whatever path leads to them."""
    if not pile or not isinstance(pile[0], ImageFile):
        return pile  # those of an archive have no path
    known = {os.path.realpath(source.path) for source in labelled if isinstance(source, ImageFile)}
    inside = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)

    def is_known(source: ImageSource) -> bool:
        assert isinstance(source, ImageFile)
        real = os.path.realpath(source.path)
        return real in known or real.startswith(inside)

    return [source for source in pile if not is_known(source)]


def _in_file(path: Path) -> Pile:
    name = path.name.lower()
    if name.endswith(TAR_SUFFIXES):
        return tar_pictures([path])
    if name.endswith(PARQUET_SUFFIX):
        return parquet_pictures([path])
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise TridentError(f"that is a single picture; it must be {KINDS}")
    return listed_pictures(path), {}


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files in a folder and its subfolders whose names end so, sorted. Hidden ones are skipped, as are _metadata."""
    matching = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        matching += [
            Path(where) / name
            for name in sorted(files)
            if name.lower().endswith(suffixes) and not name.startswith((".", "_")) and (Path(where) / name).is_file()
        ]
    return matching
