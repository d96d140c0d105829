"""Grids for the tests of ablations, and the command run in this very process."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trident.learning.checkpoint import BEST, LAST, load_checkpoint

GLYPHS = """
summary = "letters, for tests"
recipe = "glyphs"
[settings]
episode.n_way = 3
episode.n_query = 2
backbone.channels = 4
method.semantic_latents = 4
[settings.training]
steps = 4
tasks_per_step = 1
validate_every = 2
validation_tasks = 2
save_every = 1
log_every = 1
[evaluation]
tasks = 3
[[axes]]
setting = "method.label_latents"
label = "latents"
values = [3, 5]
[[axes]]
setting = "method.attfex"
values = ["positional", "off"]
"""
CELLS = ["latents-3-attfex-positional", "latents-3-attfex-off", "latents-5-attfex-positional", "latents-5-attfex-off"]

TINY_RECIPE = """
summary = "noise, for tests"
dataset = "noise"
[episode]
n_way = 3
n_query = 2
[backbone]
image_size = 16
image_channels = 1
channels = 4
[method]
label_latents = 3
semantic_latents = 3
inner_steps = 1
[training]
steps = 4
tasks_per_step = 1
validate_every = 2
validation_tasks = 2
save_every = 1
log_every = 1
"""
TINY_GRID = 'summary = "noise"\nrecipe = "tiny.toml"\n[evaluation]\ntasks = 2\n'
RATES = '[[axes]]\nsetting = "method.inner_rate"\nlabel = "alpha"\nvalues = [{}]\n'


class Answer(subprocess.CompletedProcess[str]):
    """What the command did."""


Ablate_command = Callable[..., Answer]


def grid_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


def tiny_grid(tmp_path: Path, *rates: float) -> list[object]:
    """The arguments for a grid over inner rates, which is trained within a second."""
    return [
        grid_file(tmp_path, TINY_GRID + RATES.format(", ".join(map(str, rates)))),
        *("--out", "d", "--data", "noise.store"),
    ]


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def trained_steps(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "train"]


def modified(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def assert_same_weights(one: Path, other: Path, cells: Sequence[str] = tuple(CELLS)) -> None:
    for cell in cells:
        for name in (LAST, BEST):
            mine, theirs = load_checkpoint(one / cell / name), load_checkpoint(other / cell / name)
            assert mine.step == theirs.step
            for group in ("parameters", "running", "optimizer"):
                a, b = getattr(mine, group), getattr(theirs, group)
                assert a.keys() == b.keys()
                assert all(torch.equal(a[key], b[key]) for key in a), (cell, name, group)
        assert result_of(one / cell) == result_of(other / cell)
