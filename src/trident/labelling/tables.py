"""The tables of `trident predict`: CSV and JSON."""

import csv
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trident.errors import TridentError
from trident.labelling.class_names import NONE
from trident.labelling.corrections import COLUMN, guarded, mark_of, read_corrections

if TYPE_CHECKING:
    from trident.data.images import ImageSource
    from trident.labelling.labelled import Labelled


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
    from trident.files import atomic_file

    with atomic_file(out) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


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
