"""A small run that was made by the command, for tests of what becomes of a run's files."""

from pathlib import Path

from ablation_grids import TINY_RECIPE
from commands import run_here
from stores import write_store
from tiny import tiny_store


def make_tiny_run(folder: Path) -> Path:
    """Fill a folder with `noise.store`, `tiny.toml` and the finished `run`."""
    store = tiny_store()
    write_store(folder / "noise.store", "noise", store.classes, iter(store.images))
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    answer = run_here(folder, "train", "tiny.toml", "--out", "run", "--data", "noise.store", "--device", "cpu")
    assert answer.returncode == 0, answer.stderr
    return folder
