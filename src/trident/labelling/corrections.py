"""Reads the table of `trident predict`, and what a user wrote into it: the right class, or 'none of these'."""

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from trident.errors import TridentError, errors_in
from trident.files import open_regular
from trident.labelling.class_names import NONE, class_name, is_none

if TYPE_CHECKING:
    from trident.data.images import ImageSource

COLUMN = "correction"
MARK = "picture"  # the column that tells pictures of the same name apart
_MOST_BYTES = 2**30


class Corrections(NamedTuple):
    """A table: the right class and the mark of each corrected picture, by path, and the names of all columns."""

    labels: dict[str, str]
    marks: dict[str, str]
    columns: frozenset[str]
    rows: tuple["Row", ...]  # of all pictures


class Row(NamedTuple):
    """One picture of a table, as it is written there."""

    path: str
    label: str
    correction: str
    mark: str

    def right_label(self) -> str:
        """The class, `NONE` included, that was written by hand or else found; empty if there is neither."""
        written = self.correction if self.correction.strip() else self.label
        return _label(written) if written.strip() else ""


def mark_of(source: "ImageSource", key: bytes | None = None) -> str:
    """Tells a picture's content in a table; empty if it cannot be read. Spreadsheets do not take it for a number."""
    try:
        return f"id-{(key or source.key()).hex()[:16]}"
    except TridentError:
        return ""


def read_corrections(path: Path) -> Corrections:
    """Read a CSV or JSON table.

    All of it is read, or it is an error. Spreadsheets may use `sep=`, other separators, UTF-16 and capital letters.
    """
    with open_regular(path, _MOST_BYTES) as file:
        about = os.fstat(file.fileno())
    return _read(path, about.st_ino, about.st_size, about.st_mtime_ns)


@lru_cache(2)  # the table that is read and the one that is replaced are often the same, and may be large
def _read(path: Path, number: int, size: int, changed: int) -> Corrections:
    labels: dict[str, str] = {}
    marks: dict[str, str] = {}
    columns: set[str] = set()
    where = f"{path} cannot be read as a table of 'trident predict'"
    with open_regular(path, _MOST_BYTES) as file, errors_in(where):
        utf_16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        file.seek(0)
        text = io.TextIOWrapper(file, "utf-16" if utf_16 else "utf-8-sig", "surrogateescape", newline="")
        rows = tuple(_rows(text, columns))
        for row in rows:
            if not row.correction.strip():
                continue
            label = row.right_label()
            if labels.setdefault(row.path, label) != label:
                raise TridentError(f"it corrects {row.path} twice: to '{labels[row.path]}' and to '{label}'")
            if row.mark:
                marks[row.path] = row.mark
    return Corrections(labels, marks, frozenset(columns), rows)


@lru_cache(10_000)
def _label(written: str) -> str:
    return NONE if is_none(written) else class_name(written)


def _rows(text: TextIO, columns: set[str]) -> Iterator[Row]:
    """The names of the columns are added to `columns`."""
    try:
        line = text.readline()
        if line.lstrip('"').casefold().startswith("sep="):
            line = text.readline()
        is_json = line.startswith("{")
        yield from _json_rows(line + text.read(), columns) if is_json else _csv_rows(line, text, columns)
    except (csv.Error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TridentError(f"it is another file, or not a whole one ({error})") from error


def _json_rows(text: str, columns: set[str]) -> Iterator[Row]:
    table = json.loads(text)
    columns |= table.keys() - {"classes", "pictures", "skipped"}
    for row in table["pictures"]:
        columns |= row.keys() - {"probabilities"}
        found = Row(*("" if row.get(key) is None else row[key] for key in ("path", "label", COLUMN, MARK)))
        if not all(isinstance(value, str) for value in found):
            raise TypeError(f"{row} has other values than texts")
        yield found


def _csv_rows(line: str, text: TextIO, columns: set[str]) -> Iterator[Row]:
    csv.field_size_limit(_MOST_BYTES)  # the file is no larger
    separator = max(",;\t|", key=line.split("p(")[0].count)  # names of classes may have others
    table = csv.reader(chain([line], text), delimiter=separator, strict=True)
    head = [cell.strip().casefold() for cell in next(table, [])]
    if head.count("path") != 1 or head.count(COLUMN) != 1:
        raise TridentError(f"it has no columns 'path' and '{COLUMN}', one of each")
    columns.update(head)
    width = len(head)
    path, label, correction, mark = (
        head.index(one) if one in head else None for one in ("path", "label", COLUMN, MARK)
    )
    for row in table:
        if len(row) != width:
            if any(row[width:]):
                raise TridentError(f"line {table.line_num} has more cells than the first line")
            row += [""] * width
        name, found, right = ("" if place is None else unguarded(row[place]) for place in (path, label, correction))
        yield Row(name, found, right, "" if mark is None else row[mark])


# Cells that spreadsheets must not take for formulas. `web/static/spreadsheets.js` does the same.
# A formula begins with one of the last characters (some are wide variants), at the start of a cell, or where another
# separator, or quotation marks that are not closed, may start a new cell. Apostrophes in between come from guarding.
_START = r"(^|[;,|\"\x00-\x1f])('*)"
_FORMULA = r"(?=[=+\-@\uff1d\uff0b\uff0d\uff20])"
_OPEN = re.compile(_START + _FORMULA)
_GUARDED = re.compile(_START + "'" + _FORMULA)


def guarded(text: str) -> str:
    """With an apostrophe before whatever a spreadsheet would take for a formula; other texts stay as they are."""
    return _OPEN.sub(r"\1\2'", text)


def unguarded(text: str) -> str:
    """What `guarded` was given."""
    return _GUARDED.sub(r"\1\2", text) if "'" in text else text
