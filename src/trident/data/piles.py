"""A pile of pictures to label: a folder, a list of paths, tar archives or Parquet files.

Tar archives, such as WebDataset's shards, are read where they lie; nothing is unpacked. An archive is read once, header
by header, to know where its pictures are. A member's name is only a name: no file is ever made from it.

Parquet files have a column with the bytes of image files: `image`, or the only column of bytes, or records with `bytes`
and `path`, as in the Hugging Face datasets. Another column may have their names. One row group is read at a time.
"""

import os
import tarfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from trident.data.images import IMAGE_SUFFIXES, MOST_BYTES, ImageFile, ImageSource
from trident.data.pictures import find_pictures, listed_pictures
from trident.errors import TridentError
from trident.files import MOST_DATA, open_regular
from trident.importing import needed

KINDS = "a folder of pictures, a text file with one path on each line, or tar archives or Parquet files"

Pile = tuple[Sequence[ImageSource], dict[str, str]]  # the pictures, and a message for each path that cannot be read

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_LARGEST_HEADER = 2**20  # bytes; long names and attributes of a member are in further headers
_PREFIXES = (".", "__MACOSX")  # of members that archivers add by themselves

PARQUET_SUFFIX = ".parquet"
_PARQUET = ("pyarrow.parquet", "Parquet files need pyarrow", "cluster")  # the package, and who needs it
_IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "img", "picture", "bytes", "content")
_NAME_COLUMNS = ("name", "path", "file_name", "filename", "file", "key", "__key__", "id", "image_id", "url")
_LARGEST_GROUP = 2**31  # bytes of the pictures in a row group, which is read at once
_GROUPS_IN_MEMORY = 2
_reading = threading.Lock()  # so that two threads do not read the same row group


def find_pile(query: Path, without: Iterable[Path] = ()) -> Pile:
    """The pictures of a pile. In a folder with pictures, archives are not looked into."""
    name = query.name.lower()
    if query.is_file() and name.endswith(TAR_SUFFIXES):
        return tar_pictures([query])
    if query.is_file() and name.endswith(PARQUET_SUFFIX):
        return parquet_pictures([query])
    if query.is_file() and query.suffix.lower() in IMAGE_SUFFIXES:
        raise TridentError(f"that is a single picture; it must be {KINDS}")
    if query.is_file():
        return listed_pictures(query), {}
    if not query.is_dir():
        raise TridentError(f"there is no such folder or file; it must be {KINDS}")
    pictures, unread = find_pictures(query, without)
    if pictures:
        return pictures, unread
    tars, tables = (_files(query, suffixes) for suffixes in (TAR_SUFFIXES, (PARQUET_SUFFIX,)))
    if tars and tables:
        raise TridentError(f"it has both tar archives and Parquet files ({tars[0]}, {tables[0]}): give one kind")
    archived, more = parquet_pictures(tables) if tables else tar_pictures(tars)
    return archived, unread | more


def apart_from(
    pile: Sequence[ImageSource], labelled: Iterable[ImageSource], folders: Iterable[Path]
) -> Sequence[ImageSource]:
    """The pictures of a pile without those that are labelled, or in some folders, whatever path leads to them."""
    if not pile or not isinstance(pile[0], ImageFile):
        return pile  # those of an archive have no path
    known = {os.path.realpath(source.file) for source in labelled if isinstance(source, ImageFile)}
    inside = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)
    real = {source: os.path.realpath(source.file) for source in pile if isinstance(source, ImageFile)}
    return [source for source, path in real.items() if path not in known and not path.startswith(inside)]


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files in a folder and its subfolders whose names end so, sorted. Hidden ones are skipped, as are _metadata."""
    matching: list[Path] = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = [name for name in sorted(files) if not name.startswith((".", "_")) and name.lower().endswith(suffixes)]
        matching += [Path(where) / name for name in names if (Path(where) / name).is_file()]
    return matching


class UniqueNames:
    """Names for the pictures of a file: the second `a.png` is called `a.png#2`."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def unique(self, name: str) -> str:
        candidate = name
        while candidate in self._counts:
            self._counts[name] += 1
            candidate = f"{name}#{self._counts[name]}"
        self._counts[candidate] = 1
        return candidate


@dataclass(frozen=True, slots=True)
class TarPicture(ImageSource):
    """A picture in an archive that is not compressed."""

    archive: Path
    member: str
    offset: int  # where its bytes begin
    size: int

    @property
    def name(self) -> str:
        return f"{self.archive}/{self.member}"

    def content(self) -> bytes:
        if self.size > MOST_BYTES:
            raise ValueError(f"it has {self.size} bytes: {MOST_BYTES} at most can be read from an archive")
        with open_regular(self.archive, MOST_DATA) as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise ValueError("the archive ends before this picture does")
        return content


def tar_pictures(archives: Iterable[Path]) -> tuple[list[TarPicture], dict[str, str]]:
    """The pictures in these archives, in their order there; and a message for each archive that cannot be read."""
    pictures: list[TarPicture] = []
    unread: dict[str, str] = {}
    for archive in archives:
        if archive.suffix.lower() != ".tar":
            unread[str(archive)] = f"{archive}: it is compressed, so single pictures cannot be read: decompress it"
            continue
        names = UniqueNames()
        try:
            for member in _members(archive):
                name = names.unique(member.name.removeprefix("./"))
                pictures.append(TarPicture(archive, name, member.offset_data, member.size))
        except (OSError, tarfile.TarError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or "it is damaged"
            unread[str(archive)] = f"{archive}: the archive cannot be read to its end: {why}"
    return pictures, unread


class _Headers(BufferedReader):
    """An archive as tarfile reads it here: only headers, which are small, whatever size they state."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_HEADER:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        return super().read(size)


def _members(archive: Path) -> Iterator[tarfile.TarInfo]:
    """The pictures among the members. Links, folders, other files and hidden ones are skipped."""
    raw = _Headers(open_regular(archive, MOST_DATA).detach())
    with raw, tarfile.open(fileobj=raw, mode="r:", errorlevel=1) as file:
        size = os.fstat(raw.fileno()).st_size
        for member in file:
            file.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
            path = PurePosixPath(member.name)
            if member.offset_data + (member.size if member.isreg() else 0) > size:
                raise tarfile.ReadError("it is cut short")
            hidden = any(part.startswith(_PREFIXES) and part != ".." for part in path.parts)
            if not hidden and member.isreg() and not member.issparse() and path.suffix.lower() in IMAGE_SUFFIXES:
                yield member
        # At a damaged header tarfile stops as if that were the end, which is a block of zeros.
        raw.seek(file.offset)
        if raw.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError("it is damaged after the last picture that was found")


@dataclass(frozen=True, slots=True)
class ParquetPicture(ImageSource):
    """A picture in a row of a Parquet file."""

    file: Path
    row_name: str
    column: str
    group: int  # the number of the row group
    row: int  # in the group

    @property
    def name(self) -> str:
        return f"{self.file}#{self.row_name}"

    def content(self) -> bytes:
        about = self.file.stat()  # another file of this name, or the file after a change, is not the one in memory
        with _reading:
            column = _row_group(self.file.absolute(), about.st_mtime_ns, about.st_size, self.group, self.column)
        content = column[self.row].as_py()
        if isinstance(content, dict):
            content = content["bytes"]
        if content is None:
            raise ValueError("the row has no picture")
        return bytes(content)


def parquet_pictures(files: Iterable[Path]) -> tuple[list[ParquetPicture], dict[str, str]]:
    """The pictures in these files, row by row; and a message for each file that cannot be read."""
    parquet = needed(*_PARQUET)
    pictures: list[ParquetPicture] = []
    unread: dict[str, str] = {}
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                pictures += _rows(path, file)
        except (OSError, ValueError, RuntimeError) as error:  # pyarrow's errors are of these kinds
            unread[str(path)] = f"{path}: {' '.join(str(error).split())}"
    return pictures, unread


def _rows(path: Path, file: Any) -> list[ParquetPicture]:
    column, name_column = _columns(file.schema_arrow)
    names, number, pictures = UniqueNames(), 0, []
    for group in range(file.num_row_groups):
        n_rows = file.metadata.row_group(group).num_rows
        given: list[Any] = [None] * n_rows
        if name_column is not None:
            given = file.read_row_group(group, [name_column]).flatten().column(0).to_pylist()
        for row in range(n_rows):
            name = str(number + row) if given[row] in (None, "") else str(given[row])
            pictures.append(ParquetPicture(path, names.unique(name), column, group, row))
        number += n_rows
    return pictures


def _columns(schema: Any) -> tuple[str, str | None]:
    """The column of pictures, and the one of names if there is one."""
    import pyarrow.types as kinds

    binary, records = [], []
    for entry in schema:
        if kinds.is_binary(entry.type) or kinds.is_large_binary(entry.type):
            binary.append(entry.name)
        elif kinds.is_struct(entry.type) and entry.type.get_field_index("bytes") >= 0:
            records.append(entry.name)
    usual = [name for name in _IMAGE_COLUMNS if name in [*binary, *records]]
    chosen = usual[:1] or (binary + records if len(binary + records) == 1 else [])
    if not chosen:
        raise ValueError(
            f"it has the columns {', '.join(schema.names)}: that with the bytes of image files must be called 'image'"
        )

    def is_name(kind: Any) -> bool:
        kind = kind.value_type if kinds.is_dictionary(kind) else kind
        return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_integer(kind))

    name = next((name for name in _NAME_COLUMNS if name in schema.names and is_name(schema.field(name).type)), None)
    if name is None and chosen[0] in records and schema.field(chosen[0]).type.get_field_index("path") >= 0:
        name = f"{chosen[0]}.path"
    return chosen[0], name


@lru_cache(_GROUPS_IN_MEMORY)
def _row_group(path: Path, changed: int, size: int, group: int, column: str) -> Any:
    with needed(*_PARQUET).ParquetFile(path) as file:
        entry = file.metadata.row_group(group)
        if entry.total_byte_size > _LARGEST_GROUP:
            raise ValueError(f"its row group has {entry.total_byte_size} bytes: write the file with smaller row groups")
        return file.read_row_group(group, [column]).column(column)
