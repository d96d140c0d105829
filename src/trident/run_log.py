"""A run's log: JSON lines always, TensorBoard event files where it is installed."""

import importlib.util
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trident.errors import TridentError
from trident.evaluate import Evaluation
from trident.files import atomic_file


class RunLog:
    """Step lines hold means over the steps since the last line; validation lines hold the accuracy and its protocol."""

    def __init__(self, folder: Path, step: int):
        """Lines of steps after `step` are dropped: a run that was killed computes them again."""
        path = folder / "log.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= step]
        with atomic_file(path) as file:
            file.write("".join(kept).encode())
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise TridentError(f"cannot write {path}: {error.strerror}") from error
        self._window: list[dict[str, float]] = []
        self._board: Any = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def step(self, step: int, values: dict[str, float], last_of_window: bool) -> None:
        self._window.append(values)
        if last_of_window:
            means = {key: sum(entry[key] for entry in self._window) / len(self._window) for key in values}
            self._write(step, {"kind": "train", **means})
            self._draw(step, "train", means)
            self._window.clear()

    def validation(self, step: int, evaluation: Evaluation) -> None:
        self._write(step, {"kind": "validation", **evaluation.to_json()})
        self._draw(step, "validation", {"accuracy": evaluation.accuracy})

    def _write(self, step: int, values: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise TridentError(f"cannot write {self._file.name}: {error.strerror}") from error

    def _draw(self, step: int, kind: str, values: dict[str, float]) -> None:
        if self._board is not None:
            for key, value in values.items():
                self._board.add_scalar(f"{kind}/{key}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> list[str]:
    """The whole lines of a log; a kill can leave half a line at the end."""
    if not path.is_file():
        return []
    return [line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("}\n")]
