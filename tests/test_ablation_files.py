"""What a grid file means, and what is wrong with one."""

import json
from pathlib import Path
from typing import Any

import pytest

from ablation_grids import TINY_GRID, TINY_RECIPE, Ablate_command, grid_file, modified
from conftest import assert_one_line_error
from trident.ablations import Grid, grid_from, grid_names, grid_values, load_grid


def settings_of(grid: Grid) -> list[tuple[Any, ...]]:
    return [tuple(cell.settings.values()) for cell in grid.cells]


def test_the_papers_grids() -> None:
    assert set(grid_names()) == {"batch-and-steps", "latents", "attfex-widths", "attfex", "glyphs-2x2"}
    batch = load_grid("batch-and-steps")
    assert list(batch.labels) == ["training.tasks_per_step", "adaptation.steps"]
    assert settings_of(batch) == [(5, 3), (5, 5), (10, 3), (10, 5), (20, 3), (20, 5)]
    assert [(cell.recipe.training.tasks_per_step, cell.recipe.adaptation.steps) for cell in batch.cells] == settings_of(
        batch
    )
    widths = (32, 64, 128)
    squares = {
        "latents": ["model.label_latents", "model.semantic_latents"],
        "attfex-widths": ["model.attfex_width_m", "model.attfex_width_n"],
    }
    for name, keys in squares.items():
        grid = load_grid(name)
        assert list(grid.labels) == keys
        assert settings_of(grid) == [(m, n) for m in widths for n in widths]
    assert settings_of(load_grid("attfex")) == [("positional",), ("off",)]
    for name in ("batch-and-steps", "latents", "attfex-widths", "attfex"):
        grid = load_grid(name)
        assert {cell.recipe.name for cell in grid.cells} == {"mini-5w1s"}
        assert all(cell.recipe.protocol.query_order == "shuffled" for cell in grid.cells)
        assert grid.paper is not None
        # Each holds the paper's own configuration, with the paper's own number.
        assert (86.11, 0.59) in grid.paper.accuracy.values()
        assert "class-sorted" in grid.paper.note
        assert "test classes" in grid.paper.note
    assert batch.paper is not None
    assert batch.paper.accuracy == {
        "B-5-n-5": (67.43, 0.75),
        "B-10-n-3": (69.21, 0.66),
        "B-10-n-5": (74.6, 0.84),
        "B-20-n-3": (80.82, 0.68),
        "B-20-n-5": (86.11, 0.59),
    }
    assert len(load_grid("glyphs-2x2").cells) == 4


@pytest.mark.parametrize("name", grid_names())
def test_grids_are_measured_on_validation_classes_and_survive_a_round_trip(name: str) -> None:
    grid = load_grid(name)
    assert grid.evaluation.split == "val"
    assert grid_from(json.loads(json.dumps(grid_values(grid))), "again") == grid


@pytest.mark.parametrize(("recipe", "on", "off"), [("mini-5w5s", 95.95, 78.53), ("tiered-5w1s", 86.97, 69.32)])
def test_another_recipe_has_its_own_figures_in_the_paper(recipe: str, on: float, off: float) -> None:
    grid = load_grid("attfex", recipe=recipe)
    assert {cell.recipe.name for cell in grid.cells} == {recipe}
    assert grid.paper is not None
    assert [figures[0] for figures in grid.paper.accuracy.values()] == [on, off]
    assert load_grid("latents", recipe=recipe).paper is None


def test_settings_that_vary_together_crossed_with_one_more(tmp_path: Path) -> None:
    pairs = '[[axes]]\nsettings = ["training.tasks_per_step", "adaptation.steps"]\nvalues = [[4, 3], [8, 1]]\n'
    single = '[[axes]]\nsetting = "training.clip_norm"\nvalues = [1, "none"]\n'
    head = 'summary = "s"\nrecipe = "glyphs"\n[settings]\ntraining.steps = 7\n'
    grid = load_grid(str(grid_file(tmp_path, head + pairs + single)), ["model.channels=3"], split="test", tasks=5)
    assert settings_of(grid) == [(4, 3, 1.0), (4, 3, None), (8, 1, 1.0), (8, 1, None)]
    assert grid.cells[1].name == "tasks_per_step-4-steps-3-clip_norm-none"
    assert {(cell.recipe.training.steps, cell.recipe.model.channels) for cell in grid.cells} == {(7, 3)}
    assert (grid.evaluation.split, grid.evaluation.tasks) == ("test", 5)


def test_cells_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    cells = '[[cells]]\nname = "as-it-is"\n[[cells]]\nname = "large"\nmodel.channels = 8\nadaptation.steps = 2\n'
    grid = load_grid(str(grid_file(tmp_path, TINY_GRID + cells)))
    assert [cell.name for cell in grid.cells] == ["as-it-is", "large"]
    assert [(cell.recipe.model.channels, cell.recipe.adaptation.steps) for cell in grid.cells] == [(4, 1), (8, 2)]


AXIS = '[[axes]]\nsetting = "model.channels"\nvalues = [4, 8]\n'
HEAD = 'summary = "s"\nrecipe = "glyphs"\n'
CELL = '[[cells]]\nname = "{}"\nmodel.channels = {}\n'
BAD_GRIDS = [
    ("summary = ", ["not valid TOML"]),
    ('recipe = "glyphs"\n' + AXIS, ["'summary' is missing"]),
    ('summary = "s"\nrecipe = "glyph"\n' + AXIS, ["grid.toml", "'glyph'", "'glyphs'"]),
    ('summary = "s"\nrecipe = "mine.toml"\n' + AXIS, ["no recipe file at", "mine.toml"]),
    (HEAD, ["either [[axes]] or [[cells]]"]),
    (HEAD + AXIS + CELL.format("a", 3), ["not both"]),
    (HEAD + "axes = []", ["the grid is empty"]),
    (HEAD + AXIS.replace("[4, 8]", "[]"), ["the grid is empty"]),
    (HEAD + "[evalation]\n" + AXIS, ["'evalation'", "'evaluation'"]),
    (HEAD + '[evaluation]\nsplit = "tset"\n' + AXIS, ["evaluation.split is 'tset'", "val"]),
    (HEAD + "[evaluation]\ntasks = 1\n" + AXIS, ["evaluation.tasks is 1", "2 or more"]),
    (HEAD + AXIS.replace("channels", "chanels"), ["'model.chanels'", "'model.channels'"]),
    (HEAD + AXIS.replace("model.channels", "channels"), ["write model.channels"]),
    (HEAD + "[settings]\nmodel.depth = 3\n" + AXIS, ["unknown setting 'model.depth'"]),
    (HEAD + "[settings]\nmodel.channels = 3\n" + AXIS, ["model.channels", "varies too"]),
    (HEAD + AXIS.replace("4, 8", '4, "many"'), ["cell channels-many", "a whole number"]),
    (HEAD + AXIS.replace("4, 8", "4, 0"), ["cell channels-0", "at least 1"]),
    (HEAD + AXIS.replace("4, 8", "4, 4"), ["two cells are called 'channels-4'"]),
    (HEAD + AXIS + AXIS, ["varied twice"]),
    (HEAD + AXIS.replace('setting = "model.channels"', 'settings = ["model.channels", "training.rate"]'), ["a list"]),
    (HEAD + AXIS.replace("[4, 8]", "4"), ["must be a list"]),
    (HEAD + CELL.format("a", 3) + CELL.format("A", 4), ["two cells are called 'A'"]),
    (HEAD + CELL.format("a", 3) + CELL.format("b", 3), ["a and b have the same settings"]),
    (HEAD + CELL.format("../a", 3), ["'../a' cannot be a cell's name"]),
    (HEAD + "[[cells]]\nmodel.channels = 3\n", ["cells[0] needs a name"]),
    (
        HEAD + AXIS + '[paper]\ntable = "t"\nnote = "n"\naccuracy.glyphs.channels-5 = [1, 2]',
        ["channels-5'", "'channels-8'"],
    ),
    (HEAD + AXIS + '[paper]\ntable = "t"\nnote = "n"\naccuracy.glyphs.channels-4 = [1]', ["[accuracy, interval]"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_GRIDS)
def test_wrong_grid_files(ablate: Ablate_command, tmp_path: Path, text: str, words: list[str]) -> None:
    grid = grid_file(tmp_path, text)
    before = modified(tmp_path)
    assert_one_line_error(ablate(grid, "--out", "d"), *words)
    assert modified(tmp_path) == before
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latent", "--out", "d"], ["'latent'", "'latents'"]),
        (["mine.toml", "--out", "d"], ["no grid file at mine.toml"]),
        (["latents", "--out", "d"], ["--data STORE"]),
        (["latents", "--out", "d", "label_latents=3"], ["what this grid varies"]),
        (["latents", "--out", "d", "training.stesp=3"], ["'training.stesp'", "'training.steps'"]),
        (["latents", "--out", "d", "--recipe", "mini"], ["'mini'"]),
        (["training.steps=3", "--out", "d"], ["which grid?"]),
        (["--out", "d"], ["no grid in d"]),
        (["latents", "--out", "d", "--show"], ["no grid in d"]),
        (["latents", "--show"], ["--out DIR"]),
        (["glyphs-2x2", "--out", "d", "--only", "3/2"], ["'3/2'", "K/N"]),
        (["glyphs-2x2", "--out", "d", "--only", "1,2"], ["'1,2'", "K/N"]),
        (["glyphs-2x2", "--out", "tiny.toml"], ["tiny.toml is a file"]),
        (["glyphs-2x2", "--out", "d", "--data", "noise.store"], ["cell z_label-8-attfex-positional", "16x16"]),
        # Every cell is looked at first, the last as well.
        (["queries.toml", "--out", "d"], ["cell n_query-30", "too few", "31 are needed"]),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    ablate: Ablate_command, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "queries.toml").write_text(HEAD + '[[axes]]\nsetting = "episode.n_query"\nvalues = [2, 30]\n')
    before = modified(tmp_path)
    assert_one_line_error(ablate(*arguments), *words)
    assert modified(tmp_path) == before
    assert not (tmp_path / "d").exists()


def test_grids_and_cells_are_listed(ablate: Ablate_command) -> None:
    listed = ablate().stdout.splitlines()
    assert len(listed) == len(grid_names())
    assert any(line.startswith("latents") and "9 cells" in line for line in listed)
    shown = ablate("batch-and-steps").stdout
    assert "6 B-20-n-5" in shown
    assert "training.tasks_per_step=20 adaptation.steps=5" in shown
    assert "600 tasks of the val classes" in shown
