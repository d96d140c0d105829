"""A run's log: JSON lines always, TensorBoard event files where it is installed."""

import importlib.util
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from trident.errors import os_errors
from trident.files import read_regular, write_file

LOG = "log.jsonl"
_FIELDS = {"train": ("step", "accuracy", "losses", "seconds"), "validation": ("step", "accuracy", "ci95")}  # in use


class Validated(Protocol):
    """The result of a validation: an accuracy in percent with its interval, and its protocol."""

    @property
    def accuracy(self) -> float: ...

    @property
    def ci95(self) -> float: ...

    def describe_protocol(self) -> str: ...

    def for_log(self) -> dict[str, Any]: ...


class RunLog:
    """Its lines hold means over the steps since the last one, or since the run was resumed; or a validation."""

    def __init__(self, folder: Path, step: int, validated_step: int):
        """Drops lines after these steps: the resumed run computes them again."""
        path = folder / LOG
        kept = [line for line in _lines(path) if _is_settled(line, step, validated_step)]
        write_file(path, "".join(kept))
        self._window: list[dict[str, Any]] = []
        self._board: Any = None
        with os_errors(f"cannot write the logs in {folder}"):
            self._file = path.open("a", encoding="utf-8")
            if importlib.util.find_spec("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def step(self, step: int, values: dict[str, Any], last_of_window: bool) -> None:
        self._window.append(values)
        if last_of_window:
            means = _means(self._window)
            self._write(step, {"kind": "train", **means})
            self._draw(step, "train", means)
            self._window.clear()

    def validation(self, step: int, evaluation: Validated) -> None:
        self._write(step, {"kind": "validation", **evaluation.for_log()})
        self._draw(step, "validation", {"accuracy": evaluation.accuracy})

    def _write(self, step: int, values: dict[str, Any]) -> None:
        with os_errors(f"cannot write {self._file.name}"):
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()

    def _draw(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if self._board is not None:
            losses = {f"loss/{name}": value for name, value in values.get("losses", {}).items()}
            drawn = {key: value for key, value in (values | losses).items() if key != "losses"}
            with os_errors("cannot write the TensorBoard files"):
                for key, value in drawn.items():
                    self._board.add_scalar(f"{kind}/{key}", value, step)

    def close(self) -> None:
        with suppress(OSError):  # a full disk was already reported
            self._file.close()
        with suppress(OSError):
            if self._board is not None:
                self._board.close()


def _means(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of numbers, also inside dictionaries."""
    columns = {key: [entry[key] for entry in entries] for key in entries[0]}
    return {
        key: _means(column) if isinstance(column[0], dict) else sum(column) / len(column)
        for key, column in columns.items()
    }


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return read_regular(path).decode("utf-8", "replace").splitlines(keepends=True)


def _is_settled(line: str, step: int, validated_step: int) -> bool:
    """Whether the line is complete (a kill can leave half a line) and its step is not computed again."""
    try:
        entry = json.loads(line)
        return line.endswith("\n") and entry["step"] <= (validated_step if entry["kind"] == "validation" else step)
    except (ValueError, KeyError, TypeError):
        return False


def read_log(weights: Path | None) -> tuple[dict[str, Any], ...]:
    """The log beside a weights file, without incomplete or unknown lines; empty if there is none."""
    lines = []
    for line in _lines(weights.parent / LOG) if weights else ():
        try:
            entry = json.loads(line)
            if all(isinstance(entry[key], int | float | dict) for key in _FIELDS[entry["kind"]]):
                lines.append(entry)
        except (ValueError, KeyError, TypeError):
            continue  # the run was killed or is still writing
    return tuple(lines)
