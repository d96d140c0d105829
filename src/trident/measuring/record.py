"""The record of a measured accuracy: what every file of results holds, and what `--json` prints.

Two records of the same tasks are compared in pairs, task by task, so a record has the number of right answers in each.
Nothing here imports torch, so that results are shown fast.

A file of results has a line of JSON for each, with its name. Several processes may add to one at a time.
"""

import base64
import fcntl
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trident.errors import TridentError
from trident.files import read_regular, write_file
from trident.settings import require


@dataclass(frozen=True)
class CalibrationFigures:
    """Calibration at one temperature."""

    ece: float
    temperature: float
    mce: float | None = None
    brier: float | None = None


@dataclass(frozen=True)
class Record:
    """An accuracy, what it was measured on, by which protocol, and with which weights."""

    accuracy: float  # percent
    ci95: float  # half width of its 95 % interval
    described: str  # the protocol in words
    tasks: int
    data: str  # fingerprint of the store; on the leaderboard, of the test classes
    protocol: dict[str, Any] = field(default_factory=dict)  # as values; the leaderboard's boards and rows have them
    execution: dict[str, str] = field(default_factory=dict)  # device, engine and precision
    weights: dict[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    # For a task, without features computed before. On a CPU this is processor time, on a GPU wall time; do not compare
    # them.
    milliseconds: float | None = None
    calibration: dict[str, CalibrationFigures] = field(default_factory=dict)  # by what the temperature was fitted on
    queries: int | None = None  # in a task, whose answers count
    hits: str | None = None  # right answers in each task, see `packed`
    trident: str = ""  # version

    def __post_init__(self) -> None:
        if self.hits is not None:
            try:
                fits = len(unpacked(self.hits)) == self.tasks and (self.queries is None or self.queries > 0)
            except ValueError:
                fits = False
            require(fits, f"hits are not the numbers of right answers to {self.queries} queries in {self.tasks} tasks")

    @property
    def figure(self) -> str:
        return plus_minus(self.accuracy, self.ci95)

    @property
    def accuracies(self) -> np.ndarray | None:
        """The accuracy in each task, in percent, if it is known: (task,)."""
        return None if self.hits is None or self.queries is None else 100 * unpacked(self.hits) / self.queries

    def to_json(self) -> dict[str, Any]:
        """Plain values, without those that are not known."""

        def known(fields: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in fields.items() if value not in (None, "", {})}

        return known(
            asdict(self) | {"calibration": {name: known(asdict(one)) for name, one in self.calibration.items()}}
        )


def difference(one: Record, other: Record) -> tuple[float, float] | None:
    """How many points the first is above the other, with a 95 % interval, paired by task; None if the tasks differ."""
    above, below = one.accuracies, other.accuracies
    if above is None or below is None or (one.data, one.tasks) != (other.data, other.tasks):
        return None
    return mean_and_interval(above - below)


def mean_and_interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half width of its 95 % interval, by the normal approximation."""
    if len(values) < 2:
        return float(values.mean()), math.inf
    return float(values.mean()), float(1.96 * values.std(ddof=1) / math.sqrt(len(values)))


def plus_minus(mean: float, interval: float, digits: int = 2, sign: str = "") -> str:
    """For example 48.70 ± 1.84. With the sign "+", positive numbers have one too."""
    return f"{mean:{sign}.{digits}f} ± {interval:.{digits}f}"


def packed(counts: np.ndarray) -> str:
    """Numbers from 0 as text: after a dot, one byte each; else two; four, after a colon, if one is above 65,535."""
    largest = counts.max(initial=0)
    mark, kind = (".", "u1") if largest < 256 else ("", "<u2") if largest < 65_536 else (":", "<u4")
    return mark + base64.b64encode(counts.astype(kind).tobytes()).decode()


def unpacked(text: str) -> np.ndarray:
    kind = {".": "u1", ":": "<u4"}.get(text[:1], "<u2")
    return np.frombuffer(base64.b64decode(text.lstrip(".:")), kind).astype(np.int64)


def in_todays_form(values: Any, **missing: Any) -> Any:
    """A record's plain values, also from an older form, which did not have the fields in `missing`."""
    if not isinstance(values, dict) or "described" in values:
        return values
    values = missing | values
    values["described"] = values.pop("protocol", None)
    if "ece" in values:
        values["calibration"] = {"validation": {key: values.pop(key, None) for key in ("ece", "temperature")}}
    if "device" in values:
        values["execution"] = {"device": values.pop("device")}
    return values


FILE_NAME = "results.jsonl"


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise TridentError(f"{path} is damaged: {error}") from None


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The results of a file by name, as plain values; none if there is no such file."""
    results = {}
    for number, line in enumerate(read_regular(path).split(b"\n") if path.is_file() else [], 1):
        if line.strip():
            try:
                values = json.loads(line)
                results[str(values.pop("name"))] = values
            except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
                raise TridentError(f"{path} is damaged: line {number} is not a JSON object with a name") from None
    return results


def change_line(path: Path, name: str, change: Callable[[dict[str, Any] | None], dict[str, Any]]) -> None:
    """Put the changed result of this name into a file; `change` gets the values that are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read_lines(path)
        results[name] = change(results.get(name))
        write_lines(path, results)


def write_lines(path: Path, results: dict[str, dict[str, Any]]) -> None:
    lines = [
        json.dumps({"name": name} | results[name], ensure_ascii=False, allow_nan=False) for name in sorted(results)
    ]
    write_file(path, "".join(f"{line}\n" for line in lines))
