"""Reads and checks the metadata of a weights file, which may come from an untrusted source. Torch is not needed."""

import difflib
import json
import math
import struct
from pathlib import Path
from typing import Any

from trident.errors import TridentError, is_shown
from trident.files import MOST_WEIGHTS, open_regular
from trident.recipes.files import recipe_names
from trident.weights import weight_names

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


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a weights file says about itself, and the number of its parameters."""
    try:
        check_file(path)
        with open_regular(path, MOST_WEIGHTS) as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        shapes = [tensor["shape"] for name, tensor in header.items() if name.startswith("parameters/")]
        return json.loads(header["__metadata__"]["trident"]), sum(map(math.prod, shapes))
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise TridentError(f"{path} is damaged or no safetensors file: {error!r:.200}") from error


def check_run(run: Path) -> None:
    """Check that there is a run, weights or a recipe of this name."""
    if run.exists() or run.suffix == ".toml" or str(run) in (*weight_names(), *recipe_names()):
        return
    close = difflib.get_close_matches(str(run), weight_names(), n=1, cutoff=0.8)
    hint = f": did you mean '{close[0]}'?" if close else ""
    raise TridentError(f"there is no run or weights file at {run}, and 'trident weights' does not list it{hint}")


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
        if not isinstance(before, list) or not all(isinstance(one, str) for one in (start.get("trained_on"), *before)):
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
    elif isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_texts(part, depth + 1)
