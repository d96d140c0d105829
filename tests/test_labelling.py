"""What a labeller says of a picture, whichever way it is computed, and the temperature it says it at."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import trident.nn.conv_layer as conv_layer
from conftest import TINY_RECIPE, assert_one_line_error, tiny_store
from trident.data.store import write_store
from trident.engines.execution import make_model
from trident.errors import TridentError
from trident.labelling.labeller import MOST_LABELLED, Labeller, recipe_for, weights_for
from trident.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from trident.learning.run_start import start_run
from trident.measuring.calibration import fit_temperature
from trident.measuring.evaluate import evaluate_checkpoint
from trident.web.weight_store import Shelf
from trident.weights import model_card, weight_names


def tiny_checkpoint(**changes: object) -> Checkpoint:
    """Untrained, for any number of classes and pictures."""
    usual = replace(TINY_RECIPE.model, attfex="set", classifier_start="prototypes", log_var_bound=1.0)
    model = replace(usual, **changes)  # type: ignore[arg-type]
    recipe = replace(TINY_RECIPE, model=model, adaptation=replace(TINY_RECIPE.adaptation, steps=0, mirrored=True))
    network = make_model(recipe)
    running = {key: value * 0.03 for key, value in network.initial_running().items()}  # narrow: features are wide then
    return Checkpoint(recipe, network.initial(0), running, 0)


def labeller(checkpoint: Checkpoint, n_labelled: int, seed: int) -> tuple[Labeller, np.ndarray]:
    """With random pictures, and some more of them."""
    model = checkpoint.recipe.model
    generator = np.random.default_rng(seed)
    shape = (n_labelled + 7, model.image_size, model.image_size, model.image_channels)
    pictures = generator.integers(0, 256, shape, np.uint8)
    return Labeller(checkpoint, ("a", "b", "c"), pictures[:-7], np.arange(n_labelled) % 3), pictures[-7:]


@pytest.mark.parametrize("name", [None, "mini-5w1s-set", "mini-5w1s-protonet"])
def test_pictures_alone_are_as_one_by_one(name: str | None) -> None:
    checkpoint = tiny_checkpoint() if name is None else load_checkpoint(Path(name))
    for_pile, pile = labeller(checkpoint, 4, seed=len(checkpoint.recipe.name))
    one_by_one = np.concatenate([for_pile.probabilities(picture[None]) for picture in pile])
    np.testing.assert_allclose(for_pile.probabilities_alone(pile), one_by_one, atol=2e-5)
    np.testing.assert_allclose(for_pile.probabilities_alone(pile[2:3]), one_by_one[2:3], atol=2e-5)


@pytest.mark.parametrize("source", ["transductive", "support", "running"])
@pytest.mark.parametrize("method", ["trident", "protonet"])
def test_slices_of_many_pictures_say_what_the_whole_does(
    source: Literal["transductive", "support", "running"], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(method=method, block_order="pool_activation")
    gains = {key: value - 1.5 for key, value in checkpoint.parameters.items() if key.endswith("encoder.1.norm.gain")}
    recipe = replace(checkpoint.recipe, protocol=replace(checkpoint.recipe.protocol, batch_norm=source))
    turned = replace(checkpoint, recipe=recipe, parameters=checkpoint.parameters | gains)  # a line that falls
    for_pile, pile = labeller(turned, 120, seed=5)
    calls: list[int] = []
    convolve = conv_layer.ConvLayer._convolution

    def counted(layer: conv_layer.ConvLayer, images: object, weight: object) -> object:
        calls.append(images.shape[1])  # type: ignore[attr-defined]
        return convolve(layer, images, weight)  # type: ignore[arg-type]

    monkeypatch.setattr(conv_layer.ConvLayer, "_convolution", counted)
    in_slices = for_pile.probabilities(pile)
    assert max(calls) <= conv_layer.MANY
    monkeypatch.setattr(conv_layer, "MANY", 10_000)
    np.testing.assert_allclose(for_pile.probabilities(pile), in_slices, atol=1e-5)
    assert max(calls) == 127


def test_a_few_pictures_do_not_refine_the_prototypes_and_many_do() -> None:
    checkpoint = tiny_checkpoint()
    adaptation = replace(checkpoint.recipe.adaptation, refinements=3)
    refining = replace(checkpoint, recipe=replace(checkpoint.recipe, adaptation=adaptation))
    pile = np.random.default_rng(1).integers(0, 256, (12, 16, 16, 1), np.uint8)
    for n_queries, same in ((11, True), (12, False)):  # of three classes
        one, other = (labeller(of, 4, seed=0)[0].probabilities(pile[:n_queries]) for of in (checkpoint, refining))
        assert np.allclose(one, other, atol=1e-6) == same
    one, other = (labeller(of, 4, seed=0)[0].probabilities_alone(pile) for of in (checkpoint, refining))
    np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("inner_steps", [0, 1])
def test_a_picture_alone_goes_by_the_statistics_of_training_and_several_by_their_own(inner_steps: int) -> None:
    checkpoint = tiny_checkpoint()
    adaptation = replace(checkpoint.recipe.adaptation, steps=inner_steps)
    one = replace(checkpoint, recipe=replace(checkpoint.recipe, adaptation=adaptation))
    other = replace(one, running={key: value + 0.1 for key, value in one.running.items()})
    pile = np.random.default_rng(2).integers(0, 256, (12, 16, 16, 1), np.uint8)

    def agree(say: Callable[[Labeller], np.ndarray]) -> bool:
        first, second = (say(labeller(of, 4, seed=0)[0]) for of in (one, other))
        return np.allclose(first, second, atol=1e-6)

    assert agree(lambda which: which.probabilities(pile))
    assert agree(lambda which: which.probabilities(pile[:2]))
    # Weights that take inner steps learned to take them with statistics of the images at hand.
    assert agree(lambda which: which.probabilities(pile[:1])) == (inner_steps > 0)
    assert agree(lambda which: which.probabilities_alone(pile)) == (inner_steps > 0)


def test_a_few_pictures_have_the_temperature_of_pictures_alone() -> None:
    few, pile = labeller(tiny_checkpoint(), 6, seed=1)
    warm, alone = replace(few.checkpoint, temperature=1.7), replace(few.checkpoint, temperature_alone=1.7)
    plain = few.probabilities(pile)
    np.testing.assert_array_equal(replace(few, checkpoint=warm).probabilities(pile), plain)
    assert (replace(few, checkpoint=alone).probabilities(pile).max(1) < plain.max(1)).all()


def test_too_many_labelled_pictures_are_refused_in_words() -> None:
    with pytest.raises(TridentError, match=f"{MOST_LABELLED + 1} labelled pictures: {MOST_LABELLED} at most"):
        labeller(tiny_checkpoint(), MOST_LABELLED + 1, seed=0)


def test_weights_tied_to_places_are_refused_in_words(tmp_path: Path) -> None:
    model = replace(TINY_RECIPE.model, attfex="positional", classifier_start="prototypes")
    tied = replace(tiny_checkpoint(), recipe=replace(TINY_RECIPE, model=model))
    with pytest.raises(TridentError, match="no places"):
        labeller(tied, 6, seed=0)
    started = start_run(tied.recipe, tiny_store(), "noise", tmp_path / "run", "cpu")
    save_checkpoint(tmp_path / "tied.safetensors", started)
    with pytest.raises(TridentError, match="no places"):  # before a page is served
        Shelf(str(tmp_path / "tied.safetensors"))


@pytest.mark.parametrize("alone", [False, True])
def test_a_temperature_scales_log_probabilities_and_changes_no_label(alone: bool) -> None:
    plain, pile = labeller(tiny_checkpoint(), 6, seed=1)
    one = plain.checkpoint
    warm = replace(plain, checkpoint=replace(one, temperature_alone=1.7) if alone else replace(one, temperature=1.7))

    def say(which: Labeller) -> np.ndarray:
        return which.probabilities_alone(pile) if alone else which.probabilities(np.tile(pile, (2, 1, 1, 1)))

    powers = say(plain) ** (1 / 1.7)
    np.testing.assert_allclose(say(warm), powers / powers.sum(1, keepdims=True), rtol=1e-6)
    assert (say(warm).argmax(1) == say(plain).argmax(1)).all()
    assert (say(warm).max(1) < say(plain).max(1)).all()


def test_measuring_knows_no_temperature(tmp_path: Path) -> None:
    first = start_run(TINY_RECIPE, tiny_store(), "noise", tmp_path / "run", "cpu")
    results = [
        evaluate_checkpoint(replace(first, temperature=t), tiny_store(), split="val", tasks=4, seed=0)
        for t in (1.0, 3.0)
    ]
    first_said, second_said = (result.predictions.log_probabilities for result in results)
    np.testing.assert_array_equal(first_said, second_said)


def temperatures(checkpoint: Checkpoint) -> tuple[float, float]:
    return checkpoint.temperature, checkpoint.temperature_alone


@pytest.mark.parametrize("inner_steps", [0, 2])
def test_export_keeps_temperatures_or_fits_them(
    inner_steps: int, trident_here: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = tiny_store()
    write_store(tmp_path / "noise.store", "noise", store.classes, iter(store.images))
    recipe = tiny_checkpoint().recipe
    recipe = replace(recipe, adaptation=replace(recipe.adaptation, steps=inner_steps))
    first = start_run(recipe, store, "noise", tmp_path / "run", "cpu")
    assert temperatures(first) == (1, 1)
    first = replace(first, running={key: value * 0.03 for key, value in first.running.items()})
    save_checkpoint(tmp_path / "run" / "best.safetensors", replace(first, temperature=1.25, temperature_alone=1.5))
    assert trident_here("export", "run", "--to", "kept.safetensors").returncode == 0
    assert temperatures(load_checkpoint(tmp_path / "kept.safetensors")) == (1.25, 1.5)
    call = ("export", "run", "--to", "fitted.safetensors", "--fit-temperature", "--data", "noise.store", "--tasks", "5")
    fitted = trident_here(*call)
    assert fitted.returncode == 0, fitted.stderr
    one = recipe_for(recipe, 1, 3)
    alone = replace(one, protocol=replace(one.protocol, queries_at_once="one"))
    together, apart = (
        fit_temperature(evaluate_checkpoint(replace(first, recipe=of), store, split="val", tasks=5, seed=0).predictions)
        for of in (recipe, alone)
    )
    assert inner_steps or abs(together - apart) > 0.01
    found = temperatures(load_checkpoint(tmp_path / "fitted.safetensors"))
    assert found == pytest.approx((together, together if inner_steps else apart), abs=1e-3)
    assert f"temperature {found[0]:.3f}, for pictures alone {found[1]:.3f}" in fitted.stdout
    assert_one_line_error(trident_here("export", "run", "--to", "x", "--data", "noise.store"), "--fit-temperature")
    save_checkpoint(tmp_path / "odd.safetensors", replace(first, temperature=-1.0))
    with pytest.raises(TridentError, match=r"odd.safetensors is damaged: .*temperature -1"):
        load_checkpoint(tmp_path / "odd.safetensors")


def test_shipped_weights_have_the_temperatures_of_their_card(trident_here: Callable) -> None:
    entries = json.loads(trident_here("weights", "--json").stdout)
    listed = {entry["name"]: (entry["temperature"], entry["temperature_alone"]) for entry in entries}
    for name in weight_names():
        for temperature in listed[name]:
            assert temperature != 1
            assert f"temperature {temperature:.3f} fitted on" in model_card(name)
    assert {weights_for(5, 5), weights_for(25, 5)} <= set(listed)
