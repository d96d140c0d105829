"""Pictures in Parquet files: a column with the bytes of image files, and perhaps a column with their names.

Both are found by themselves. The pictures are in the column `image`, or in the only column of bytes, or in a column of
records with `bytes` and `path`, as the Hugging Face datasets have them. Files are read one row group at a time.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trident.data.images import ImageSource
from trident.data.pictures import UniqueNames
from trident.errors import TridentError

PARQUET_SUFFIX = ".parquet"
_IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "img", "picture", "bytes", "content")
_NAME_COLUMNS = ("name", "path", "file_name", "filename", "file", "key", "__key__", "id", "image_id", "url")
_LARGEST_GROUP = 2**31  # bytes of the pictures in a row group, which is read at once
_GROUPS_IN_MEMORY = 2
_reading = threading.Lock()  # so that two threads do not read the same row group


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
    parquet = _imported()
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
    texts = [entry.name for entry in schema if _is_name(kinds, entry.type)]
    name = next((name for name in _NAME_COLUMNS if name in texts), None)
    if name is None and chosen[0] in records and schema.field(chosen[0]).type.get_field_index("path") >= 0:
        name = f"{chosen[0]}.path"
    return chosen[0], name


def _is_name(kinds: Any, kind: Any) -> bool:
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_integer(kind))


@lru_cache(_GROUPS_IN_MEMORY)
def _row_group(path: Path, changed: int, size: int, group: int, column: str) -> Any:
    with _imported().ParquetFile(path) as file:
        entry = file.metadata.row_group(group)
        if entry.total_byte_size > _LARGEST_GROUP:
            raise ValueError(f"its row group has {entry.total_byte_size} bytes: write the file with smaller row groups")
        return file.read_row_group(group, [column]).column(column)


def _imported() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TridentError("Parquet files need pyarrow: pip install 'trident-fewshot[cluster]'") from error
    return pyarrow.parquet
