"""Files of results: a line of JSON for each, with its name. Several processes may add to one at a time."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trident.errors import TridentError
from trident.files import atomic_file, read_regular

FILE_NAME = "results.jsonl"


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise TridentError(f"{path} is damaged: {error}") from None


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The results of a file by name, as plain values; none if there is no such file."""
    found = {}
    for number, line in enumerate(read_regular(path).split(b"\n") if path.is_file() else [], 1):
        if line.strip():
            try:
                values = json.loads(line)
                found[str(values.pop("name"))] = values
            except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
                raise TridentError(f"{path} is damaged: line {number} is not a JSON object with a name") from None
    return found


def change_line(path: Path, name: str, change: Callable[[dict[str, Any] | None], dict[str, Any]]) -> None:
    """Put the changed result of this name into a file; `change` gets the values that are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = read_lines(path)
        found[name] = change(found.get(name))
        write_lines(path, found)


def write_lines(path: Path, results: dict[str, dict[str, Any]]) -> None:
    lines = [
        json.dumps({"name": name} | results[name], ensure_ascii=False, allow_nan=False) for name in sorted(results)
    ]
    with atomic_file(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
