"""The weights in packages/weights: complete, small, found once the package is installed."""

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import trident.weights
from trident.learning.checkpoint import load_checkpoint
from trident.recipes.loading import load_recipe
from trident.weights import FOLDER, model_card, weight_names, weights_file

PACKAGE = Path(__file__).parents[2] / "packages" / "weights" / "trident_weights"
FILES = sorted(PACKAGE.glob("*.safetensors"))


def test_all_are_weights_of_recipes_in_half_precision_with_temperatures() -> None:
    assert FILES
    for file in FILES:
        checkpoint = load_checkpoint(file)
        assert checkpoint.recipe == load_recipe(file.stem), file.stem  # what its training was told
        assert checkpoint.provenance["data"] is None and not checkpoint.optimizer
        assert all(value != 1 for value in checkpoint.temperatures), file.stem
        assert file.stat().st_size < 2**20


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A package called `other_weights` that adds a folder of weights."""
    spec = ModuleSpec("other_weights", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    entry = EntryPoint("made-up", "other_weights", "trident.weights")

    def entries(**wanted: Any) -> list[EntryPoint]:
        return [entry] if wanted == {"group": "trident.weights"} else []

    monkeypatch.setattr(trident.weights, "entry_points", entries)
    monkeypatch.setattr(trident.weights, "find_spec", lambda name: spec if name == "other_weights" else None)
    trident.weights._folders.cache_clear()
    yield tmp_path
    trident.weights._folders.cache_clear()


def test_another_package_adds_weights_but_replaces_none(installed: Path) -> None:
    own = weights_file("glyphs-protonet")
    (installed / "glyphs-added.safetensors").write_bytes(own.read_bytes())
    (installed / "glyphs-added.md").write_text("a card", "utf-8")
    (installed / "glyphs-protonet.safetensors").write_bytes(b"something else")
    assert {"glyphs-added", "glyphs-protonet"} <= set(weight_names())
    assert weights_file("glyphs-added").parent == installed and weights_file("glyphs-protonet").parent == FOLDER
    assert model_card("glyphs-added") == "a card"
    assert load_checkpoint("glyphs-added").recipe.name == "glyphs-protonet"
