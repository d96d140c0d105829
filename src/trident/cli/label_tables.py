"""The tables of `trident predict`: CSV and JSON."""

import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trident.labelling.corrections import COLUMN, NONE
from trident.labelling.spreadsheets import guarded

if TYPE_CHECKING:
    from trident.labelling.labelled import Labelled


@dataclass(frozen=True)
class Row:
    """One picture of the table."""

    path: str
    label: str  # empty if it belongs to no class, or if it is not sure enough
    best_guess: str
    probability: float
    runner_up: str
    runner_up_probability: float
    none_of_these: bool
    typicality: float | None
    correction: str  # as the user wrote it
    probabilities: dict[str, float]


def rows_of(
    labelled: "Labelled", names: list[str], corrected: dict[str, str], threshold: float, least_sure_first: bool
) -> list[Row]:
    """The readable pictures and the corrected ones, sorted by path or the least sure first."""
    rows = [
        _row(labelled, place, name, threshold) for place, name in enumerate(names) if place not in labelled.failures
    ]
    rows += [_corrected(name, right, labelled.classes) for name, right in corrected.items()]
    if corrected:
        rows.sort(key=lambda row: row.path)
    if least_sure_first:
        rows.sort(key=lambda row: (bool(row.correction), not row.none_of_these, row.probability))
    return rows


def _row(labelled: "Labelled", place: int, name: str, threshold: float) -> Row:
    ranking = labelled.ranking(place)
    (best, first), (second, next_best) = ranking[:2]
    none = labelled.belongs_to_none(place)
    label = "" if none or first < threshold else best
    typical = None if labelled.typicality is None else float(labelled.typicality[place])
    return Row(name, label, best, first, second, next_best, none, typical, "", dict(ranking))


def _corrected(name: str, right: str, classes: tuple[str, ...]) -> Row:
    """A picture that the user has labelled: its class is certain."""
    none = right == NONE
    probabilities = {one: float(one == right) for one in classes}
    label = "" if none else right
    return Row(name, label, label, float(not none), "", 0.0, none, None, right, probabilities)


def as_csv(rows: list[Row], classes: tuple[str, ...], every: bool, shown: Callable[[str], str] = str) -> str:
    """Paths and classes do not act as formulas in a spreadsheet. `shown` makes them fit for a terminal, if need be."""

    def cell(text: str) -> str:
        return shown(guarded(text))

    head = ["path", "label", "probability", "runner_up", "runner_up_probability", "best_guess"]
    head += ["none_of_these", "typicality", COLUMN]
    lines = [_line([*head, *(cell(f"p({name})") for name in classes if every)])]
    for row in rows:
        typical = "" if row.typicality is None else f"{row.typicality:.3f}"
        cells = [cell(row.path), cell(row.label), f"{row.probability:.4f}"]
        cells += [cell(row.runner_up), f"{row.runner_up_probability:.4f}"]
        cells += [cell(row.best_guess), "yes" if row.none_of_these else "", typical, cell(row.correction)]
        lines.append(_line([*cells, *(f"{row.probabilities[name]:.4f}" for name in classes if every)]))
    return "".join(lines)


def _line(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # quotes cells with either kind of line break
    return text.getvalue().removesuffix("\r\n") + "\n"


def as_json(rows: list[Row], classes: tuple[str, ...], every: bool, skipped: dict[str, str]) -> str:
    pictures = []
    for row in rows:
        values: dict[str, Any] = {
            "path": row.path,
            "label": row.label or None,
            "best_guess": row.best_guess,
            "probability": row.probability,
            "runner_up": row.runner_up,
            "runner_up_probability": row.runner_up_probability,
            "none_of_these": row.none_of_these,
            "typicality": row.typicality,
            "correction": row.correction or None,
        }
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
