"""The weights that come with the package, and weights made to be shared."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from commands import assert_one_line_error
from tiny import TINY_BACKBONE, TINY_METHOD, TINY_RECIPE, tiny_store
from trident.leaderboard.card import card_of
from trident.learning.checkpoint import Temperatures, load_checkpoint, save_checkpoint, shareable, with_method
from trident.learning.run_start import start_run
from trident.methods.ensemble import Ensemble
from trident.methods.metric.matching import MatchingNetwork
from trident.methods.metric.protonet import ProtoNet
from trident.recipes.loading import flat_values, load_recipe
from trident.weights import weight_names, weights_file

names = pytest.mark.parametrize("name", weight_names())


def recipe_of(name: str) -> str:
    """The paper's recipe was trained on two orders of queries."""
    return re.sub("-paper-(sorted|shuffled)$", "", name)


def test_there_are_some_of_each_kind() -> None:
    for beginning in ("mini-5w1s", "mini-5w5s"):
        assert any(name.startswith(beginning) for name in weight_names())


@names
def test_weights_are_whole_small_and_say_nothing_of_the_machine_they_came_from(name: str) -> None:
    checkpoint = load_checkpoint(Path(name))
    assert checkpoint.recipe.name == recipe_of(name)
    assert not checkpoint.optimizer
    assert checkpoint.best is not None and checkpoint.best["protocol"]["split"] == "val"
    assert all(bool(torch.isfinite(value).all()) for value in checkpoint.parameters.values())
    # The ensemble's classifiers of the training classes are not used after training.
    unused = "classes." if isinstance(checkpoint.recipe.method, Ensemble) else "none"
    assert sum(value.numel() for key, value in checkpoint.parameters.items() if not key.startswith(unused)) <= 500_000
    with safe_open(weights_file(name), "pt") as file:
        provenance = json.dumps(json.loads(file.metadata()["trident"])["provenance"])
    for path in ("/tmp", "/work", "/home", "/root", "\\\\"):
        assert path not in provenance


BEFORE_STAGES = {"mini-5w1s-set", "mini-5w5s-set"}  # their second stage was a command of its own
FREE = {"training.save_every", "training.log_every"}  # they change no weight


@names
def test_weights_were_made_by_the_recipe_of_their_name(name: str) -> None:
    order = {"sorted": ["protocol.query_order=class_sorted"]}.get(name.rpartition("-paper-")[2], [])
    inside, shipped = (
        flat_values(recipe) for recipe in (load_checkpoint(name).recipe, load_recipe(recipe_of(name), order))
    )
    differ = {key for key in inside | shipped if inside.get(key) != shipped.get(key)} - FREE
    assert differ == ({"training.start_from"} if name in BEFORE_STAGES else set())


def test_another_method_has_no_temperatures_of_the_first() -> None:
    first = load_checkpoint("glyphs-simpleshot")
    assert first.temperatures != Temperatures()
    assert with_method(first, "baseline").temperatures == Temperatures()
    assert with_method(first, "simpleshot").temperatures == first.temperatures


@names
def test_a_model_card_says_what_one_must_know(name: str) -> None:
    card = card_of(name)
    for word in ("Trained on", "steps", "Protocol", "Accuracy", "ECE", "Intended use", "Limits", "shuffled", "seed"):
        assert word in card, word
    best = load_checkpoint(Path(name)).best
    assert best is not None
    assert f"{best['accuracy']:.2f}" in card, "the validation that chose these weights"


def test_listing(trident_here: Callable) -> None:
    listed = json.loads(trident_here("weights", "--json").stdout)
    assert [entry["name"] for entry in listed] == weight_names()
    assert all(entry["parameters"] > 0 and entry["steps"] > 0 for entry in listed)
    shown = trident_here("weights").stdout
    assert all(name in shown for name in weight_names())
    for entry, line in zip(listed, shown.splitlines(), strict=False):
        assert line.startswith(entry["name"])
        assert ("labels no pictures" in line) == entry["positional"] == ("paper" in entry["name"])
    first = weight_names()[0]
    assert trident_here("weights", first).stdout.strip() == card_of(first).strip()


def test_a_file_or_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_checkpoint(Path(weight_names()[0])).recipe.name == recipe_of(weight_names()[0])
    start_run(TINY_RECIPE, tiny_store(), "noise", tmp_path / weight_names()[0], "cpu")
    assert load_checkpoint(Path(weight_names()[0])).recipe == TINY_RECIPE


def test_unknown_names(trident_here: Callable) -> None:
    assert_one_line_error(trident_here("weights", "mini-9w9s"), "no weights 'mini-9w9s'", "mini-5w5s-set")
    assert_one_line_error(trident_here("evaluate", "mini-9w9s"), "'trident weights' does not list it")


def test_weights_to_share(trident_here: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = tiny_store()
    first = start_run(TINY_RECIPE, store, "/some/where.store", tmp_path / "first", "cpu")
    save_checkpoint(tmp_path / "first" / "best.safetensors", replace(first, step=7))
    begun_with = load_checkpoint(tmp_path / "first")
    second = start_run(TINY_RECIPE, store, "/some/where.store", tmp_path / "second", "cpu", start_from=begun_with)
    assert second.steps_before == 7 and second.all_steps == 7 + second.step
    assert "for 0 steps, after 7 steps of the run it started from" in second.describe()
    assert trident_here("export", "second", "--to", "mine.safetensors").returncode == 0
    content = (tmp_path / "mine.safetensors").read_bytes()
    assert b"/some/where" not in content
    assert str(tmp_path).encode() not in content
    shared = load_checkpoint(tmp_path / "mine.safetensors")
    assert shared.steps_before == 7
    assert shared.provenance["start"]["provenance"]["fingerprint"] == store.fingerprint
    assert all(torch.equal(value, first.parameters[key]) for key, value in shared.parameters.items())
    assert_one_line_error(
        trident_here("export", "second", "--to", "mine.safetensors"), "mine.safetensors exists already"
    )


def test_a_start_from_other_weights_takes_what_fits(tmp_path: Path) -> None:
    store = tiny_store()
    first = start_run(TINY_RECIPE, store, "noise", tmp_path / "first", "cpu")
    trained = replace(first, parameters={key: value + 1 for key, value in first.parameters.items()})
    recipe = replace(TINY_RECIPE, method=replace(TINY_METHOD, classifier_start="prototypes"))
    second = start_run(recipe, store, "noise", tmp_path / "second", "cpu", start_from=trained)
    assert torch.equal(second.parameters["backbone.0.weight"], trained.parameters["backbone.0.weight"])
    assert torch.equal(second.parameters["classifier.scale"], recipe.initial(0)["classifier.scale"])
    protonet = replace(TINY_RECIPE, method=ProtoNet())
    other = start_run(protonet, store, "noise", tmp_path / "other", "cpu")
    fourth = start_run(recipe, store, "noise", tmp_path / "fourth", "cpu", start_from=other)
    assert torch.equal(fourth.parameters["backbone.0.weight"], other.parameters["backbone.0.weight"])
    assert torch.equal(fourth.parameters["classifier.scale"], recipe.initial(0)["classifier.scale"])
    named = replace(recipe, training=replace(recipe.training, start_from=str(tmp_path / "other")))
    seventh = start_run(named, store, "noise", tmp_path / "seventh", "cpu")
    assert torch.equal(seventh.parameters["backbone.0.weight"], other.parameters["backbone.0.weight"])
    matching = replace(TINY_RECIPE, method=MatchingNetwork())
    scaled = replace(other, parameters=other.parameters | {"scale": torch.tensor(3.0)})
    sixth = start_run(matching, store, "noise", tmp_path / "sixth", "cpu", start_from=scaled)
    assert torch.equal(sixth.parameters["backbone.0.weight"], other.parameters["backbone.0.weight"])
    assert torch.equal(sixth.parameters["scale"], matching.initial(0)["scale"])  # of a cosine, not of distances
    assert fourth.trained_on_before == []
    bigger = start_run(recipe, tiny_store(9), "noise", tmp_path / "fifth", "cpu", start_from=fourth)
    assert bigger.trained_on_before == ["noise"]
    assert "trained on noise, then on noise for" in bigger.describe()
    wider = replace(TINY_RECIPE, backbone=replace(TINY_BACKBONE, channels=8))
    with pytest.raises(Exception, match="its backbone has another shape"):
        start_run(wider, store, "noise", tmp_path / "third", "cpu", start_from=trained)
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"temperatures": [1, 2]},
        {"step": float("inf")},
        {"provenance": {"start": "x"}},
        {"recipe": {"method": {"name": "os:system"}}},
        {"recipe": {"backbone": {"channels": 10**18}}},
    ],
    ids=str,
)
def test_a_file_with_nonsense_in_it_is_refused_in_one_line(
    change: dict, tmp_path: Path, trident_here: Callable
) -> None:
    with safe_open(weights_file("mini-5w1s-protonet"), "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    about = json.loads(metadata["trident"])
    for key, value in change.items():
        about[key] = about[key] | value if key == "provenance" else value
        if key == "recipe":
            original = json.loads(metadata["trident"])["recipe"]
            about[key] = original | {name: original[name] | part for name, part in value.items()}
    path = tmp_path / "odd.safetensors"
    path.write_bytes(save(tensors, metadata | {"trident": json.dumps(about)}))
    assert_one_line_error(trident_here("evaluate", path, "--data", "glyphs"), "odd.safetensors")


def test_half_precision_halves_the_file_and_keeps_the_values(tmp_path: Path) -> None:
    start = start_run(TINY_RECIPE, tiny_store(), "noise", tmp_path / "run", "cpu")
    large = replace(start, running=start.running | {"backbone.0.norm.variance": torch.full((4,), 1e6)})
    for name, half in (("whole", False), ("half", True)):
        save_checkpoint(tmp_path / f"{name}.safetensors", shareable(large, half))
    sizes = {path.stem: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert sizes["whole"] - sizes["half"] > 1.9 * sum(value.numel() for value in start.parameters.values())
    found = load_checkpoint(tmp_path / "half.safetensors")
    for key, value in start.parameters.items():
        assert found.parameters[key].dtype == torch.float32
        torch.testing.assert_close(found.parameters[key], value, rtol=1e-3, atol=1e-6)
    assert torch.equal(found.running["backbone.0.norm.variance"], torch.full((4,), 1e6))  # too large for half precision
