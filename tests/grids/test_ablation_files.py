"""What a grid file means, and what is wrong with one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ablation_grids import TINY_GRID, TINY_RECIPE, Ablate_command, grid_file, modified
from commands import assert_one_line_error
from trident.grids.files import MeasuredOn, grid_names
from trident.grids.grid import Grid, Result, load_grid, read_results
from trident.grids.plot import grid_chart
from trident.grids.tables import as_values, footnotes, table_rows
from trident.measuring.record import Record, packed
from trident.recipes.loading import setting_of

STUDIES = Path(__file__).parents[2] / "studies"
PAPERS_GRIDS = str(STUDIES / "reproduction" / "grids" / "{}.toml")
LATENTS = PAPERS_GRIDS.format("latents")
PARTS = str(STUDIES / "ablation" / "parts.toml")


def settings_of(grid: Grid) -> list[tuple[Any, ...]]:
    return [tuple(grid.varied(cell).values()) for cell in grid.cells]


def test_the_papers_grids() -> None:
    batch = load_grid(PAPERS_GRIDS.format("batch-and-steps"))
    assert list(batch.labels) == ["training.tasks_per_step", "method.inner_steps"]
    assert settings_of(batch) == [(5, 3), (5, 5), (10, 3), (10, 5), (20, 3), (20, 5)]
    assert [cell.recipe.training.tasks_per_step for cell in batch.cells] == [5, 5, 10, 10, 20, 20]
    widths = (32, 64, 128)
    squares = {
        "latents": ["method.label_latents", "method.semantic_latents"],
        "attfex-widths": ["method.attfex_width_m", "method.attfex_width_n"],
    }
    for name, keys in squares.items():
        grid = load_grid(PAPERS_GRIDS.format(name))
        assert list(grid.labels) == keys
        assert settings_of(grid) == [(m, n) for m in widths for n in widths]
    assert settings_of(load_grid(PAPERS_GRIDS.format("attfex"))) == [("positional",), ("off",)]
    for name in ("batch-and-steps", "latents", "attfex-widths", "attfex"):
        grid = load_grid(PAPERS_GRIDS.format(name))
        assert {cell.recipe.name for cell in grid.cells} == {"mini-5w1s"}
        assert all(cell.recipe.protocol.query_order == "shuffled" for cell in grid.cells)
        # Each holds the paper's own configuration, with the paper's own number.
        assert [86.11, 0.59] in grid.paper_figures.values()
        assert "class-sorted" in grid.paper.note
        assert "test classes" in grid.paper.note
    assert batch.paper_figures == {
        "B-5-n-5": [67.43, 0.75],
        "B-10-n-3": [69.21, 0.66],
        "B-10-n-5": [74.6, 0.84],
        "B-20-n-3": [80.82, 0.68],
        "B-20-n-5": [86.11, 0.59],
    }
    assert len(load_grid("glyphs-2x2").cells) == 4


@pytest.mark.parametrize("name", [*grid_names(), *map(str, STUDIES.glob("*/grids/*.toml")), PARTS])
def test_grids_are_measured_on_validation_classes(name: str) -> None:
    measured = load_grid(name).evaluation
    assert measured is not None and measured.split == "val"


@pytest.mark.parametrize(("recipe", "on", "off"), [("mini-5w5s", 95.95, 78.53), ("tiered-5w1s", 86.97, 69.32)])
def test_another_recipe_has_its_own_figures_in_the_paper(recipe: str, on: float, off: float) -> None:
    grid = load_grid(PAPERS_GRIDS.format("attfex"), recipe=recipe)
    assert {cell.recipe.name for cell in grid.cells} == {recipe}
    assert [figures[0] for figures in grid.paper_figures.values()] == [on, off]
    assert load_grid(PAPERS_GRIDS.format("latents"), recipe=recipe).paper_figures == {}


def test_settings_that_vary_together_crossed_with_one_more(tmp_path: Path) -> None:
    pairs = '[[axes]]\nsettings = ["training.tasks_per_step", "method.inner_steps"]\nvalues = [[4, 3], [8, 1]]\n'
    single = '[[axes]]\nsetting = "clip_norm"\nvalues = [1, "none"]\n'  # a section may be omitted
    head = 'summary = "s"\nrecipe = "glyphs"\n[settings]\ntraining.steps = 7\n'
    grid = load_grid(str(grid_file(tmp_path, head + pairs + single)), ["backbone.channels=3"], split="test", tasks=5)
    assert settings_of(grid) == [(4, 3, 1.0), (4, 3, None), (8, 1, 1.0), (8, 1, None)]
    assert list(grid.labels) == ["training.tasks_per_step", "method.inner_steps", "training.clip_norm"]
    assert grid.cells[1].name == "tasks_per_step-4-inner_steps-3-clip_norm-none"
    assert {(cell.recipe.training.steps, setting_of(cell.recipe, "backbone.channels")) for cell in grid.cells} == {
        (7, 3)
    }
    assert grid.evaluation == MeasuredOn(split="test", tasks=5)


def test_labels_of_settings_that_vary_together(tmp_path: Path) -> None:
    axis = '[[axes]]\nsettings = ["training.steps", "method.inner_steps"]\nlabels = ["S", "n"]\nvalues = [[4, 3]]\n'
    grid = load_grid(str(grid_file(tmp_path, HEAD + axis)))
    assert [cell.name for cell in grid.cells] == ["S-4-n-3"]


def test_cells_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    cells = '[[cells]]\nname = "as-it-is"\n[[cells]]\nname = "large"\nbackbone.channels = 8\nmethod.inner_steps = 2\n'
    grid = load_grid(str(grid_file(tmp_path, TINY_GRID + cells)))
    assert [cell.name for cell in grid.cells] == ["as-it-is", "large"]
    keys = ("backbone.channels", "method.inner_steps")
    found = [tuple(setting_of(cell.recipe, key) for key in keys) for cell in grid.cells]
    assert found == settings_of(grid) == [(4, 1), (8, 2)]


def test_every_cell_is_trained_with_every_seed(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    cells = '[[cells]]\nname = "whole"\n[[cells]]\nname = "large"\nbackbone.channels = 8\n'
    grid = load_grid(str(grid_file(tmp_path, "seeds = [3, 5]\n" + TINY_GRID + cells)))
    assert [cell.name for cell in grid.cells] == ["whole-seed-3", "whole-seed-5", "large-seed-3", "large-seed-5"]
    assert [cell.group for cell in grid.cells] == ["whole", "whole", "large", "large"]
    assert [cell.recipe.training.seed for cell in grid.cells] == [3, 5, 3, 5]
    assert [cell.recipe.backbone.channels for cell in grid.cells] == [4, 4, 8, 8]  # type: ignore[attr-defined]


def ended(described: str = "the protocol", **measured: Any) -> Result:
    return Result({}, {}, 4, 4, 100, Record(50.0, 1.0, described, 3, "abc", **measured), None, "cpu")


def test_the_table_of_a_grid_with_seeds_pairs_its_means_by_task(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    cells = '[[cells]]\nname = "whole"\n[[cells]]\nname = "large"\nbackbone.channels = 8\n'
    grid = load_grid(str(grid_file(tmp_path, "seeds = [3, 5]\n" + TINY_GRID + cells)))  # 6 queries in a task
    right = {"whole-seed-3": [3, 0, 3], "whole-seed-5": [3, 6, 3], "large-seed-3": [6, 3, 4], "large-seed-5": [2, 5, 4]}
    results = {name: ended(hits=packed(np.array(hits)), queries=6) for name, hits in right.items()}
    heading, whole, large = table_rows(grid, results)
    assert heading == ["cell", "channels", "accuracy", "by seed", "difference from whole", "parameters", "meta-updates"]
    assert whole[2:5] == ["50.00 ± 0.00", "33.33 / 66.67", "-"]
    assert large[2:5] == ["66.67 ± 0.00", "72.22 / 61.11", "+16.67 ± 0.00 (+38.89 / -5.56)"]  # 4 of 6 on average
    figure = grid_chart(grid, results)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["large"]
    assert figure.axes[0].containers[0].lines[0].get_xdata() == pytest.approx([100 / 6])
    seeds = next(line for line in figure.axes[0].lines if line.get_marker() == "|" and len(line.get_xdata()) == 2)
    assert seeds.get_xdata() == pytest.approx([38.89, -5.56], abs=0.01)
    failed = Result({}, {}, 3, None, 100, None, "the loss is not finite", "cpu")
    first_failed = table_rows(grid, results | {"large-seed-3": failed})[2]
    assert first_failed[3:5] == ["failed / 61.11", "-5.56 ± 21.78 (failed / -5.56)"] and first_failed[-1] == "4"
    results["large-seed-5"] = failed  # left out of the mean, and of the difference
    expected = ["72.22 ± 28.81", "72.22 / failed", "+38.89 ± 21.78 (+38.89 / failed)"]
    assert table_rows(grid, results)[2][2:5] == expected
    without_hits = results | {"large-seed-3": ended()}
    assert table_rows(grid, without_hits)[2][2:5] == ["-", "- / failed", "-"]
    assert "large-seed-5 failed: the loss is not finite" in footnotes(grid, results)
    assert footnotes(grid, results)[-1] == "4 of 4 cells are finished, 1 of them failed"
    not_ended = {name: result for name, result in results.items() if name != "whole-seed-5"}
    assert table_rows(grid, not_ended)[1][2:5] == ["-", "33.33 / -", "-"]  # no mean before all have ended
    none = table_rows(grid, results | {"large-seed-3": failed})[2]
    assert none[2:5] == ["-", "failed / failed", "-"]
    whole_failed = table_rows(grid, results | {"whole-seed-5": failed})[2]
    assert whole_failed[4] == "+38.89 ± 21.78 (+38.89 / failed)"
    results["large-seed-5"] = results["large-seed-3"]
    assert table_rows(grid, results)[2][4].startswith("+22.22")
    del results["whole-seed-5"]  # no longer complete: no difference of the other seed alone
    assert table_rows(grid, results)[2][4] == "-"
    results["large-seed-5"] = failed
    del results["whole-seed-3"]
    assert [row[2:5] for row in table_rows(grid, results)[1:]] == [
        ["-", "- / -", "-"],
        ["72.22 ± 28.81", "72.22 / failed", "-"],
    ]
    assert as_values(grid, results)["cells"][3]["group"] == "large"
    assert grid_chart(grid, results).axes[0].get_ylabel() == "accuracy, %"  # nothing to compare with


def test_the_protocol_of_most_cells_names_none_of_them() -> None:
    grid = load_grid(PARTS)
    some = {cell.name: cell.group for cell in grid.cells if cell.group in ("whole", "no-attfex", "no-refinement")}
    protocols = {name: "without" if group == "no-refinement" else "with" for name, group in some.items()}
    results = {name: ended(protocol) for name, protocol in protocols.items()}
    assert footnotes(grid, results)[-3:-1] == ["no-refinement: without", "all other finished cells: with"]
    same = dict.fromkeys(results, ended("with"))
    assert footnotes(grid, same)[-2] == "with"


@pytest.mark.parametrize("name", ["parts", "unlabelled"])
def test_the_document_has_the_kept_results(name: str) -> None:
    grid = load_grid(str(STUDIES / "ablation" / f"{name}.toml"))
    document = (STUDIES.parent / "docs" / "ablation.md").read_text()
    lines = {line.split("`")[-2]: line for line in document.splitlines() if line.startswith("|") and "`" in line}
    results = read_results(grid, STUDIES / "ablation" / name)
    for group, _, accuracy, by_seed, difference, *_ in table_rows(grid, results)[1:]:
        shown = "" if difference == "-" else difference.partition(" (")[0]
        assert f"| {accuracy} | {by_seed} | {shown}" in lines[group]


def test_many_varied_settings_share_a_column() -> None:
    rows = {row[0]: row[1] for row in table_rows(load_grid(PARTS), {})}
    assert rows["cell"] == "changed" and rows["whole"] == "-" and rows["no-attfex"] == "method.attfex=off"
    assert rows["prototypes-and-steps"] == "method.inner_steps=5" and len(rows) == 17


AXIS = '[[axes]]\nsetting = "backbone.channels"\nvalues = [4, 8]\n'
HEAD = 'summary = "s"\nrecipe = "glyphs"\n'
CELL = '[[cells]]\nname = "{}"\nbackbone.channels = {}\n'
PAPER = '[paper]\ntable = "t"\nnote = "n"\naccuracy.glyphs.{}'
TWO = AXIS.replace('setting = "backbone.channels"', 'settings = ["backbone.channels", "training.rate"]')
BAD_GRIDS = [
    ("summary = ", ["not valid TOML"]),
    ('recipe = "glyphs"\n' + AXIS, ["'summary' is missing"]),
    ('summary = 3\nrecipe = "glyphs"\n' + AXIS, ["summary is 3", "text"]),
    ('summary = "s"\nrecipe = "glyph"\n' + AXIS, ["grid.toml", "'glyph'", "'glyphs'"]),
    ('summary = "s"\nrecipe = "mine.toml"\n' + AXIS, ["no recipe file at", "mine.toml"]),
    (HEAD, ["[[axes]]", "[[cells]]"]),
    (HEAD + AXIS + CELL.format("a", 3), ["either [[axes]] or [[cells]]", "not both"]),
    ("seeds = [1, 1]\n" + HEAD + AXIS, ["seeds = [1, 1]", "twice"]),
    ("seeds = [1]\n" + HEAD + "[settings]\ntraining.seed = 3\n" + AXIS, ["training.seed is set", "has seeds"]),
    (HEAD + "axes = []", ["the grid is empty"]),
    (HEAD + "axes = 3", ["axes is 3", "a list"]),
    (HEAD + "axes = [3]", ["'axes[0]' must be a table of keys"]),
    (HEAD + AXIS.replace("[4, 8]", "[]"), ["the grid is empty"]),
    (HEAD + "[evalation]\n" + AXIS, ["'evalation'", "'evaluation'"]),
    (HEAD + '[evaluation]\nsplit = "tset"\n' + AXIS, ["evaluation.split is 'tset'", "val"]),
    (HEAD + "[evaluation]\ntasks = 1\n" + AXIS, ["evaluation.tasks is 1", "2 or more"]),
    (HEAD + '[evaluation]\ntasks = "many"\n' + AXIS, ["evaluation.tasks is 'many'", "a whole number"]),
    (HEAD + AXIS.replace("channels", "chanels"), ["'backbone.chanels'", "'backbone.channels'"]),
    (HEAD + AXIS.replace("setting =", "seting ="), ["'axes[0].seting'", "'setting'"]),
    (HEAD + "[[axes]]\nvalues = [1]", ["either 'setting' or 'settings'"]),
    (HEAD + "[settings]\nmethod.depth = 3\n" + AXIS, ["unknown setting 'method.depth'"]),
    (HEAD + "[settings]\nbackbone.channels.x = 3\n" + AXIS, ["backbone.channels is {'x': 3}", "a whole number"]),
    (HEAD + "[settings]\nbackbone.channels = 3\n" + AXIS, ["backbone.channels", "varies too"]),
    (HEAD + AXIS.replace("4, 8", '4, "many"'), ["cell channels-many", "a whole number"]),
    (HEAD + AXIS.replace("4, 8", "4, 2020-01-01"), ["cell channels-2020-01-01", "a whole number"]),
    (HEAD + AXIS.replace("4, 8", "4, 0"), ["cell channels-0", "1 or more"]),
    (HEAD + AXIS.replace("4, 8", "4, 4"), ["two cells are called 'channels-4'"]),
    (HEAD + AXIS + AXIS, ["varied twice"]),
    (HEAD + TWO, ["a list"]),
    (HEAD + TWO.replace("4, 8", "[4, 1.0], [8]"), ["one entry for each of"]),
    (HEAD + AXIS.replace("[4, 8]", "4"), ["must be a list"]),
    (HEAD + CELL.format("a", 3) + CELL.format("A", 4), ["two cells are called"]),
    (HEAD + CELL.format("a", 3) + CELL.format("b", 3), ["a and b have the same settings"]),
    (HEAD + CELL.format("../a", 3), ["'../a' cannot be a cell's name"]),
    (HEAD + CELL.format("table.md", 3), ["'table.md' cannot be a cell's name"]),
    (HEAD + "[[cells]]\nbackbone.channels = 3\n", ["cells[0] needs a name"]),
    (HEAD + "[[cells]]\nname = 3\n", ["cells[0].name is 3", "text"]),
    (HEAD + AXIS + PAPER.format("channels-5 = [1, 2]"), ["'channels-5'", "'channels-8'"]),
    (HEAD + AXIS + PAPER.format("channels-4 = [1, 2]").replace('note = "n"', ""), ["[paper] needs", "'note'"]),
    (HEAD + AXIS + PAPER.format("channels-4 = [1]"), ["[accuracy, interval]"]),
    (HEAD + AXIS + PAPER.format('channels-4 = ["1", 2]'), ["channels-4[0] is '1'", "a number"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_GRIDS)
def test_wrong_grid_files(ablate: Ablate_command, tmp_path: Path, text: str, words: list[str]) -> None:
    grid = grid_file(tmp_path, text)
    before = modified(tmp_path)
    assert_one_line_error(ablate(grid, "--out", "d"), "grid.toml", *words)
    assert modified(tmp_path) == before
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["glyphs-22", "--out", "d"], ["'glyphs-22'", "'glyphs-2x2'"]),
        (["mine.toml", "--out", "d"], ["no grid file at mine.toml"]),
        ([LATENTS, "--out", "d"], ["--data STORE"]),
        ([LATENTS, "--out", "d", "label_latents=3"], ["this grid varies"]),
        ([LATENTS, "--out", "d", "training.stesp=3"], ["'training.stesp'", "'training.steps'"]),
        ([LATENTS, "--out", "d", "training.steps"], ["'training.steps' is not a setting"]),
        ([LATENTS, "--out", "d", "--recipe", "mini"], ["'mini'"]),
        (["training.steps=3", "--out", "d"], ["which grid?"]),
        (["--out", "d"], ["which grid?"]),
        ([LATENTS, "--out", "d", "--show"], ["no cell of latents is finished in d"]),
        ([LATENTS, "--show"], ["--out DIR"]),
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
    assert any(line.startswith("glyphs-2x2") and "4 cells" in line for line in listed)
    assert json.loads(ablate("--json").stdout)[0].items() >= {"grid": "glyphs-2x2", "cells": 4}.items()
    shown = ablate(PAPERS_GRIDS.format("batch-and-steps")).stdout
    (last,) = [line.split() for line in shown.splitlines() if line.startswith("B-20-n-5")]
    assert last == ["B-20-n-5", "20", "5", "-", "86.11", "±", "0.59", "-", "-"]
    assert "n is method.inner_steps" in shown
    assert "600 val tasks" in shown
    cells = json.loads(ablate(PAPERS_GRIDS.format("batch-and-steps"), "--json").stdout)["cells"]
    assert cells[5]["settings"] == {"training.tasks_per_step": 20, "method.inner_steps": 5}
    assert cells[5]["state"] == "unfinished"
