"""The tables of `trident predict`, CSV and JSON: how they are written, and how they are read again with what a user
wrote into them: the right class, or 'none of these'.
"""

import codecs
import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from trident.errors import TridentError, errors_in
from trident.files import open_regular, write_file
from trident.labelling.class_names import NONE, class_name, is_none

if TYPE_CHECKING:
    from trident.data.images import ImageSource
    from trident.labelling.labelled import Labelled

COLUMN = "correction"
MARK = "picture"  # the column that tells pictures of the same name apart
_MOST_BYTES = 2**30


class Corrections(NamedTuple):
    """A table: the right class and the mark of each corrected picture, by path, and the names of all columns."""

    labels: dict[str, str]
    marks: dict[str, str]
    columns: frozenset[str]
    rows: tuple["ReadRow", ...]  # of all pictures


class ReadRow(NamedTuple):
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


def _rows(text: TextIO, columns: set[str]) -> Iterator[ReadRow]:
    """The names of the columns are added to `columns`."""
    try:
        line = text.readline()
        if line.lstrip('"').casefold().startswith("sep="):
            line = text.readline()
        is_json = line.startswith("{")
        yield from _json_rows(line + text.read(), columns) if is_json else _csv_rows(line, text, columns)
    except (csv.Error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TridentError(f"it is another file, or not a whole one ({error})") from error


def _json_rows(text: str, columns: set[str]) -> Iterator[ReadRow]:
    table = json.loads(text)
    columns |= table.keys() - {"classes", "pictures", "skipped"}
    for row in table["pictures"]:
        columns |= row.keys() - {"probabilities"}
        cells = ReadRow(*("" if row.get(key) is None else row[key] for key in ("path", "label", COLUMN, MARK)))
        if not all(isinstance(cell, str) for cell in cells):
            raise TypeError(f"{row} has other values than texts")
        yield cells


def _csv_rows(line: str, text: TextIO, columns: set[str]) -> Iterator[ReadRow]:
    csv.field_size_limit(_MOST_BYTES)  # the file is no larger
    separator = max(",;\t|", key=line.split("p(")[0].count)  # names of classes may have others
    table = csv.reader(chain([line], text), delimiter=separator, strict=True)
    head = [cell.strip().casefold() for cell in next(table, [])]
    if head.count("path") != 1 or head.count(COLUMN) != 1:
        raise TridentError(f"it has no columns 'path' and '{COLUMN}', one of each")
    columns.update(head)
    width = len(head)
    places = [head.index(one) if one in head else None for one in ("path", "label", COLUMN, MARK)]
    for row in table:
        if len(row) != width:
            if any(row[width:]):
                raise TridentError(f"line {table.line_num} has more cells than the first line")
            row += [""] * width
        path, label, correction, mark = ("" if place is None else row[place] for place in places)
        yield ReadRow(unguarded(path), unguarded(label), unguarded(correction), mark)


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


@dataclass(frozen=True)
class Row:
    """One picture: the columns of the table, and the probabilities of all classes."""

    path: str
    label: str  # empty if it belongs to no class, or if it is not sure enough
    probability: float
    runner_up: str
    runner_up_probability: float
    best_guess: str
    none_of_these: bool
    typicality: float | None
    picture: str  # a mark of its content, see `mark_of`
    correction: str  # as the user wrote it
    probabilities: dict[str, float]


COLUMNS = [column.name for column in fields(Row)][:-1]


def rows_of(
    labelled: "Labelled",
    pile: "Sequence[ImageSource]",
    corrected: "Mapping[ImageSource, str]",
    threshold: float,
    least_sure_first: bool,
) -> list[Row]:
    """The readable pictures and the corrected ones, sorted by path or the least sure first."""
    rows = [_row(labelled, place, one, threshold) for place, one in enumerate(pile) if place not in labelled.failures]
    rows += [_corrected(one, right, labelled.classes) for one, right in corrected.items()]
    if corrected:
        rows.sort(key=lambda row: row.path)
    if least_sure_first:
        rows.sort(key=lambda row: (bool(row.correction), not row.none_of_these, row.probability))
    return rows


def _row(labelled: "Labelled", place: int, source: "ImageSource", threshold: float) -> Row:
    ranking = labelled.ranking(place)
    (best, first), (second, next_best) = ranking[:2]
    none = labelled.belongs_to_none(place)
    label = "" if none or first < threshold else best
    typical = None if labelled.typicality is None else float(labelled.typicality[place])
    mark = mark_of(source, labelled.keys.get(place))
    return Row(source.name, label, first, second, next_best, best, none, typical, mark, "", dict(ranking))


def _corrected(source: "ImageSource", right: str, classes: tuple[str, ...]) -> Row:
    """A picture that the user has labelled: its class is certain."""
    none = right == NONE
    probabilities = {one: float(one == right) for one in classes}
    label = "" if none else right
    return Row(source.name, label, float(not none), "", 0.0, label, none, None, mark_of(source), right, probabilities)


def as_csv(rows: list[Row], classes: tuple[str, ...], every: bool, shown: Callable[[str], str] = str) -> str:
    """Paths and classes do not act as formulas in a spreadsheet. `shown` makes them fit for a terminal, if need be."""

    def cell(value: str | float | None, digits: int = 4) -> str:
        if isinstance(value, str):
            return shown(guarded(value))
        if isinstance(value, bool):
            return "yes" if value else ""
        return "" if value is None else f"{value:.{digits}f}"

    lines = [_line([*COLUMNS, *(cell(f"p({name})") for name in classes if every)])]
    for row in rows:
        cells = [cell(getattr(row, name), 3 if name == "typicality" else 4) for name in COLUMNS]
        lines.append(_line([*cells, *(cell(row.probabilities[name]) for name in classes if every)]))
    return "".join(lines)


def _line(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # quotes cells with either kind of line break
    return text.getvalue().removesuffix("\r\n") + "\n"


def as_json(rows: list[Row], classes: tuple[str, ...], every: bool, skipped: dict[str, str]) -> str:
    pictures = []
    for row in rows:
        values: dict[str, Any] = {name: getattr(row, name) for name in COLUMNS}
        values |= {name: values[name] or None for name in ("label", COLUMN)}
        pictures.append(values | ({"probabilities": row.probabilities} if every else {}))
    failures = [{"path": path, "error": why} for path, why in skipped.items()]
    return json.dumps({"classes": list(classes), "pictures": pictures, "skipped": failures}, indent=1) + "\n"


def write(text: str, out: Path | None) -> None:
    if out is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
        return
    write_file(out, text.encode("utf-8", "surrogateescape"))


def check_kept(out: Path | None, taken: dict[str, tuple[str, str]]) -> None:
    """Hand work is not lost: a file is only replaced by a table with all of its columns, and of its corrections.

    `taken` has the right class and the mark of each corrected picture.
    """
    if out is None or not out.exists() or not out.stat().st_size:
        return
    try:
        there = read_corrections(out)
    except TridentError as error:
        raise TridentError(f"{error}; so it is kept: give another --out") from None
    others = sorted(name for name in there.columns.difference(COLUMNS) if not (name[:2] == "p(" and name[-1] == ")"))
    if others:
        raise TridentError(f"{out} has a column that would be lost, '{others[0]}': give another --out")
    lost = []
    for path, name in there.labels.items():
        right, mark = taken.get(path, (None, ""))
        if right != name or there.marks.get(path, mark) != mark:
            lost.append(path)
    if lost:
        raise TridentError(
            f"{out} has corrections that would be lost ({len(lost)}, the first for {lost[0]}): add --corrections {out} "
            "and the --query of all these pictures, or give another --out"
        )
