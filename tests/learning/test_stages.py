"""Recipes with stages: one command trains them all, and goes on after a stop."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ablation_grids import Answer
from commands import assert_one_line_error
from trident.data.glyphs import open_glyphs
from trident.errors import TridentError
from trident.learning.checkpoint import load_checkpoint
from trident.learning.run_start import stages_of, start_run
from trident.recipes.loading import load_recipe

FIRST = """
base = "glyphs-matching"
summary = "the first stage"
[training]
steps = 3
tasks_per_step = 1
validate_every = 3
validation_tasks = 2
save_every = 1
log_every = 1
"""
SECOND = """
base = "glyphs-matching"
summary = "the second stage"
[method]
name = "protonet"
[training]
start_from = "recipe:first.toml"
steps = 2
tasks_per_step = 1
validate_every = 2
validation_tasks = 2
rate = 1e-12
"""
Here = Callable[..., Answer]


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first.toml").write_text(FIRST)
    (tmp_path / "second.toml").write_text(SECOND)
    monkeypatch.chdir(tmp_path)


def assert_started_from_the_first_stage() -> None:
    """The second stage has a rate of almost zero, so its backbone is still that of the first."""
    first, second = load_checkpoint("run/start"), load_checkpoint("run")
    assert (first.step, second.step) == (3, 2)
    assert second.provenance["start"]["step"] == 3
    for name in first.recipe.backbone.names:
        torch.testing.assert_close(first.parameters[name], second.parameters[name], rtol=0, atol=1e-8)


@pytest.mark.usefixtures("recipes")
def test_one_command_trains_all_stages(trident_here: Here) -> None:
    result = trident_here("train", "second.toml", "--out", "run", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert_started_from_the_first_stage()


@pytest.mark.usefixtures("recipes")
def test_the_same_command_goes_on_after_a_stop_in_the_first_stage(trident_here: Here) -> None:
    recipe = load_recipe("first.toml")
    start_run(recipe, open_glyphs(), "glyphs", Path("run/start"), "cpu")
    assert_one_line_error(trident_here("train", "--resume", "run"), "still in its first stage")
    result = trident_here("train", "second.toml", "--out", "run", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert_started_from_the_first_stage()
    again = trident_here("train", "second.toml", "--out", "run", "--device", "cpu")
    assert_one_line_error_at_the_end(again, "already holds a run")


def assert_one_line_error_at_the_end(result: Answer, words: str) -> None:
    assert result.returncode == 2 and words in result.stderr.strip().splitlines()[-1]


@pytest.mark.usefixtures("recipes")
def test_stages_that_cannot_be(trident_here: Here) -> None:
    Path("first.toml").write_text(FIRST.replace("steps = 3", 'steps = 3\nstart_from = "recipe:second.toml"'))
    assert_one_line_error(trident_here("train", "second.toml", "--out", "run"), "one starts from itself")
    Path("first.toml").write_text(FIRST)
    recipe = load_recipe("second.toml")
    assert [folder for _, folder in stages_of(recipe, Path("run"))] == [Path("run/start"), Path("run")]
    with pytest.raises(TridentError, match="which is not trained yet"):
        start_run(recipe, open_glyphs(), "glyphs", Path("run"), "cpu")
