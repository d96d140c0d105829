"""Checks the metadata of a weights file, which may come from an untrusted source."""

import math
import struct
from pathlib import Path
from typing import Any

from trident.errors import is_shown
from trident.files import MOST_WEIGHTS, open_regular

_MOST_HEADER = 2**24  # bytes; those of the included weights have about 20,000
_MOST_STEPS = 2**48
_MOST_CHARACTERS = 1000
_MOST_STARTS = 20  # longest chain of runs, each started from the one before
_TEMPERATURES = (1e-3, 1e3)


def check_file(path: Path) -> None:
    """Check the sizes of a safetensors file before it is parsed."""
    with open_regular(path, MOST_WEIGHTS) as file:
        size, first = path.stat().st_size, file.read(8)
    if len(first) == 8 and struct.unpack("<Q", first)[0] > min(_MOST_HEADER, size - 8):
        raise ValueError("its header is longer than the file, or much longer than that of weights")


def steps(value: Any, what: str = "step") -> int:
    if type(value) is not int or not 0 <= value < _MOST_STEPS:
        raise ValueError(f"its {what} is not a number of steps")
    return value


def temperature(value: Any) -> float:
    least, most = _TEMPERATURES
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"temperature {str(value)[:40]} is not a number from {least:g} to {most:g}")
    return float(value)


def best(value: Any) -> dict[str, Any] | None:
    """The best validation: None before the first."""
    if value is None:
        return None
    steps(_table(value, "best validation").get("step"), "step of the best validation")
    accuracy = value.get("accuracy")
    if not isinstance(accuracy, int | float) or not math.isfinite(accuracy) or not 0 <= accuracy <= 100:
        raise ValueError("the accuracy of its best validation is not a percentage")
    _check_texts(value)
    return dict(value)


def provenance(value: Any, depth: int = 0) -> dict[str, Any]:
    """Where weights come from: the dataset, the software, and perhaps the weights that the run started from."""
    if depth > _MOST_STARTS:
        raise ValueError(f"its provenance goes back over more than {_MOST_STARTS} runs")
    _check_texts(_table(value, "provenance"))
    for key in ("dataset", "fingerprint", "data"):
        if not isinstance(value.get(key, ""), str | None):
            raise ValueError(f"the {key} of its provenance is not text")
    start = value.get("start")
    if start is not None:
        steps(_table(start, "start").get("step"), "step of its start")
        steps(start.get("steps_before", 0), "number of steps before its start")
        before = start.get("trained_on_before", [])
        if not isinstance(before, list) or not all(
            isinstance(name, str) for name in (start.get("trained_on"), *before)
        ):
            raise ValueError("what its start was trained on is not a list of names")
        provenance(start.get("provenance"), depth + 1)
    return dict(value)


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"its {what} is not a table")
    return value


def _check_texts(value: Any, depth: int = 0) -> None:
    """Check that all text can be printed: control characters could change what a terminal shows."""
    if depth > 3 * _MOST_STARTS:
        raise ValueError("its metadata is nested too deeply")
    if isinstance(value, str):
        if len(value) > _MOST_CHARACTERS or not is_shown(value):
            raise ValueError("its metadata has control characters or very long texts")
    elif isinstance(value, dict):
        for key, part in value.items():
            _check_texts(key, depth + 1)
            _check_texts(part, depth + 1)
    elif isinstance(value, list):
        for part in value:
            _check_texts(part, depth + 1)
