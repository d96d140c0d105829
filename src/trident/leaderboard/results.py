"""The kept results: one JSON file for each row, and what can be said about two rows on the same tasks."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trident.files import atomic_file
from trident.grids.files import read_json
from trident.measuring.evaluate import mean_and_interval
from trident.measuring.hits import unpacked

FOLDER = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Measured:
    """One row under one condition of one board."""

    accuracy: float  # percent
    ci95: float  # half width
    ece: float  # with the temperature
    temperature: float  # fitted on balanced tasks of the validation classes
    tasks: int
    hits: str  # queries that are right in each task, see measuring/hits.py
    # For a task, without features computed before. On a CPU this is processor time, on a GPU wall time; do not compare
    # them.
    milliseconds: float
    device: str
    parameters: int  # the backbone's included
    protocol: str
    data: str  # fingerprint of the table of test classes, which decides the tasks
    weights: dict[str, Any]
    trident: str


Results = dict[str, dict[str, Measured]]  # by board and condition


def difference(one: Measured, other: Measured, n_queries: int) -> tuple[float, float] | None:
    """How many points the first is above the other, with a 95 % interval, paired by task; None if the tasks differ."""
    if (one.data, one.tasks) != (other.data, other.tasks):
        return None
    return mean_and_interval(100 * (unpacked(one.hits) - unpacked(other.hits)) / n_queries)


def read(name: str, folder: Path = FOLDER) -> Results:
    """The results of a row; empty if it was not measured yet."""
    path = folder / f"{name}.json"
    results: Results = read_json(Results, path) if path.is_file() else {}
    return results


def add(name: str, board: str, found: dict[str, Measured], folder: Path) -> None:
    """Keep what was measured of a row on one board, and what is already there of other boards."""
    results = read(name, folder) | {board: found}
    content = {
        key: {condition: asdict(measured) for condition, measured in results[key].items()} for key in sorted(results)
    }
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / f"{name}.json") as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
