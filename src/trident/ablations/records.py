"""The files of a grid's folder: `grid.json`, each cell's `result.json`, and the locks of those who work in it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import trident
from trident.ablations import Grid, Measurement, grid_from, grid_values, setting_of, shown
from trident.data.store import ImageStore
from trident.errors import TridentError
from trident.files import atomic_file
from trident.recipes import setting_types
from trident.settings import Recipe

GRID = "grid.json"
RESULT = "result.json"
# How a run is computed, not what it computes: a grid may be continued with others, on a smaller machine for instance.
_FREE = ("tasks_per_chunk", "save_every", "log_every")


@dataclass(frozen=True)
class GridFolder:
    """What `grid.json` says."""

    grid: Grid
    data: str  # how to find the store again
    dataset: str
    fingerprint: str


@dataclass(frozen=True)
class Result:
    """What `result.json` says of a finished cell: a measurement, or the error that ended its training."""

    cell: str
    settings: dict[str, Any]
    recipe: dict[str, Any]
    steps: int  # trained
    best_step: int | None  # whose weights were measured: the best on the validation classes
    parameters: int
    seconds: dict[str, float]
    evaluation: dict[str, Any] | None  # accuracy, ci95 and the protocol behind them
    protocol: str | None  # the same protocol in words
    error: str | None
    device: str
    trident: str


def read_folder(out: Path) -> GridFolder | None:
    """The grid that a folder holds, if it holds one."""
    if not (out / GRID).is_file():
        return None
    values = _read_json(out / GRID)
    try:
        grid = grid_from(values["grid"], str(out / GRID))
        return GridFolder(grid, values["data"], values["dataset"], values["fingerprint"])
    except (KeyError, TypeError) as error:
        raise TridentError(f"{out / GRID} is damaged: {error!r}") from error


def read_results(grid: Grid, out: Path) -> dict[str, Result]:
    """The finished cells' results, by cell."""
    results = {}
    for cell in grid.cells:
        path = out / cell.name / RESULT
        if path.is_file():
            values = _read_json(path)
            try:
                results[cell.name] = Result(**{entry.name: values[entry.name] for entry in fields(Result)})
            except (KeyError, TypeError) as error:
                raise TridentError(f"{path} is damaged: {error!r}") from error
    return results


def claim_folder(grid: Grid, store: ImageStore, data: str, out: Path) -> None:
    """Make the folder this grid's own, or see that it is already; a folder of other work is refused."""
    if out.exists() and not out.is_dir():
        raise TridentError(f"{out} is a file: --out needs a folder")
    make_folder(out)
    with locked(out / "grid.lock", wait=True):  # of two different grids at once, one must find the other's file
        try:
            found = read_folder(out)
            if found is None:
                _check_free(grid, out)
                found = GridFolder(grid, data, store.dataset, store.fingerprint)
                about = {"trident": trident.__version__, **asdict(found), "grid": grid_values(grid)}
                write_json(out / GRID, about)
        finally:
            (out / "grid.lock").unlink(missing_ok=True)
    check_same(found.grid, grid, out)
    if found.fingerprint != store.fingerprint:
        raise TridentError(
            f"{out} was begun on other data: its {found.dataset} has the fingerprint {found.fingerprint[:12]}, "
            f"this one {store.fingerprint[:12]}"
        )


def check_same(before: Grid, after: Grid, out: Path) -> None:
    """Refuse a grid whose results would be no part of the table of the one that the folder holds."""
    changed = _difference(before, after)
    if changed is not None:
        raise TridentError(f"{out} holds another grid: {changed}; choose another folder, or give --out {out} alone")


def _difference(before: Grid, after: Grid) -> str | None:
    """In words, the first thing that tells the two apart."""
    names = [[cell.name for cell in grid.cells] for grid in (before, after)]
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1]))
        return f"{odd[0]} is a cell of only one of them" if odd else "its cells have another order"
    for entry in fields(Measurement):
        mine, theirs = (getattr(grid.evaluation, entry.name) for grid in (before, after))
        if mine != theirs:
            return f"evaluation.{entry.name} is {mine} there, not {theirs}"
    for old, new in zip(before.cells, after.cells, strict=True):
        changed = changed_setting(old.recipe, new.recipe)
        if changed is not None:
            return f"in cell {old.name}, {changed}"
    return None


def changed_setting(before: Recipe, after: Recipe) -> str | None:
    for key, _ in setting_types():
        mine, theirs = setting_of(before, key), setting_of(after, key)
        if mine != theirs and key not in [f"training.{name}" for name in _FREE]:
            return f"{key} is {shown(mine)} there, not {shown(theirs)}"
    return None


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process has the lock, for as long as the block or the process lasts."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            held = False
        except OSError as error:
            raise TridentError(f"cannot lock {path}: {error.strerror}; --out needs a disk with locks") from error
        yield held


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TridentError(f"cannot make the folder {folder}: {error.strerror}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise TridentError(f"{path} is damaged: {error}") from error
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write((json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())


def _check_free(grid: Grid, out: Path) -> None:
    for cell in grid.cells:
        if (out / cell.name).exists():
            raise TridentError(f"{out / cell.name} is there, but {out} holds no grid: choose another folder")
