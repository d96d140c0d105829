"""What a labeller says of a picture, whichever way it is computed, and the temperature it says it at."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import trident.nn.conv4 as conv4
from commands import assert_one_line_error
from stores import write_store
from tiny import TINY_METHOD, TINY_RECIPE, tiny_store
from trident.backbones.conv4 import conv4_of
from trident.data.store import ImageStore, store_in_memory
from trident.errors import TridentError
from trident.labelling.labeller import ENOUGH_TOGETHER, MOST_LABELLED, Labeller
from trident.leaderboard.card import card_of
from trident.learning.checkpoint import Checkpoint, Temperatures, load_checkpoint, save_checkpoint
from trident.learning.run_start import start_run
from trident.measuring.calibration import fit_temperature
from trident.measuring.evaluate import evaluate
from trident.methods.base import Method
from trident.methods.metric.protonet import ProtoNet
from trident.recipes.recipe import Recipe
from trident.settings import Views
from trident.web.networks import WeightStore
from trident.weights import weight_names, weights_for

USUAL = replace(TINY_METHOD, attfex="set", classifier_start="prototypes", log_var_bound=1.0, inner_steps=0)


MEAN_FEATURES = Views(mirrored=True, corners=True, shifted=True, average="features")
MIRRORED = Views(mirrored=True)


def tiny_checkpoint(method: Method = USUAL, views: Views = MIRRORED) -> Checkpoint:
    """Untrained, for any number of classes and pictures."""
    recipe = replace(TINY_RECIPE, method=method, views=views)
    return Checkpoint(recipe, recipe.initial(0), narrow(recipe.model.initial_running()), 0)


def narrow(running: dict[str, Any]) -> dict[str, Any]:
    """Running statistics that make features wide."""
    return {key: value * 0.03 for key, value in running.items()}


def labeller(checkpoint: Checkpoint, n_labelled: int, seed: int) -> tuple[Labeller, np.ndarray]:
    """With random pictures, and some more of them."""
    backbone = conv4_of(checkpoint.recipe.backbone, "a test")
    generator = np.random.default_rng(seed)
    shape = (n_labelled + 7, backbone.image_size, backbone.image_size, backbone.image_channels)
    pictures = generator.integers(0, 256, shape, np.uint8)
    return Labeller(checkpoint, ("a", "b", "c"), pictures[:-7], np.arange(n_labelled) % 3), pictures[-7:]


@pytest.mark.parametrize(
    ("name", "views"),
    [
        (None, MIRRORED),
        ("mini-5w1s-set", MIRRORED),
        ("mini-5w1s-protonet", MIRRORED),
        ("mini-5w1s-protonet", MEAN_FEATURES),
    ],
)
def test_pictures_alone_are_as_one_by_one(name: str | None, views: Views) -> None:
    checkpoint = tiny_checkpoint() if name is None else load_checkpoint(Path(name))
    checkpoint = replace(checkpoint, recipe=replace(checkpoint.recipe, views=views))
    for_pile, pile = labeller(checkpoint, 4, seed=len(checkpoint.recipe.name))
    one_by_one = np.concatenate([for_pile.probabilities(picture[None]) for picture in pile])
    np.testing.assert_allclose(for_pile.probabilities_alone(pile), one_by_one, atol=2e-5)
    np.testing.assert_allclose(for_pile.probabilities_alone(pile[2:3]), one_by_one[2:3], atol=2e-5)


@pytest.mark.parametrize("source", ["transductive", "support", "running"])
@pytest.mark.parametrize("method", [USUAL, ProtoNet()], ids=["trident", "protonet"])
def test_slices_of_many_pictures_say_what_the_whole_does(
    source: Literal["transductive", "support", "running"], method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(method)
    turned_layers = ("backbone.1.norm.gain", "semantic_encoder.1.norm.gain")
    gains = {key: value - 1.5 for key, value in checkpoint.parameters.items() if key in turned_layers}
    recipe = replace(checkpoint.recipe, protocol=replace(checkpoint.recipe.protocol, batch_norm=source))
    turned = replace(checkpoint, recipe=recipe, parameters=checkpoint.parameters | gains)  # a line that falls
    for_pile, pile = labeller(turned, 120, seed=5)
    calls: list[int] = []
    convolve = conv4.ConvLayer._convolution

    def counted(layer: conv4.ConvLayer, images: object, weight: object) -> object:
        calls.append(images.shape[1])  # type: ignore[attr-defined]
        return convolve(layer, images, weight)  # type: ignore[arg-type]

    monkeypatch.setattr(conv4.ConvLayer, "_convolution", counted)
    in_slices = for_pile.probabilities(pile)
    assert max(calls) <= conv4.MOST_AT_ONCE
    monkeypatch.setattr(conv4, "MOST_AT_ONCE", 10_000)
    np.testing.assert_allclose(for_pile.probabilities(pile), in_slices, atol=1e-5)
    assert max(calls) == 127


def test_a_few_pictures_do_not_refine_the_prototypes_and_many_do() -> None:
    checkpoint = tiny_checkpoint()
    refining = tiny_checkpoint(replace(USUAL, refinements=3))
    pile = np.random.default_rng(1).integers(0, 256, (12, 16, 16, 1), np.uint8)
    for n_queries, same in ((11, True), (12, False)):  # of three classes
        one, other = (labeller(of, 4, seed=0)[0].probabilities(pile[:n_queries]) for of in (checkpoint, refining))
        assert np.allclose(one, other, atol=1e-6) == same
    one, other = (labeller(of, 4, seed=0)[0].probabilities_alone(pile) for of in (checkpoint, refining))
    np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("inner_steps", [0, 1])
def test_a_picture_alone_goes_by_the_statistics_of_training_and_several_by_their_own(inner_steps: int) -> None:
    one = tiny_checkpoint(replace(USUAL, inner_steps=inner_steps))
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


@pytest.mark.parametrize(
    ("n_pile", "which"),
    [(1, "alone"), (2, "few"), (3 * ENOUGH_TOGETHER - 1, "few"), (3 * ENOUGH_TOGETHER, "many"), (20, "many")],
)
def test_the_number_of_pictures_chooses_the_temperature(n_pile: int, which: str) -> None:
    plain, _ = labeller(tiny_checkpoint(), 6, seed=1)  # of three classes
    pile = np.random.default_rng(3).integers(0, 256, (n_pile, 16, 16, 1), np.uint8)
    for name in Temperatures._fields:
        warm = replace(plain, checkpoint=replace(plain.checkpoint, temperatures=Temperatures()._replace(**{name: 1.7})))
        for say, chosen in ((Labeller.probabilities, which), (Labeller.probabilities_alone, "alone")):
            if name == chosen:
                assert (say(warm, pile).max(1) < say(plain, pile).max(1)).all()
            else:
                np.testing.assert_array_equal(say(warm, pile), say(plain, pile))


def test_too_many_labelled_pictures_are_refused_in_words() -> None:
    with pytest.raises(TridentError, match=f"{MOST_LABELLED + 1} labelled pictures: {MOST_LABELLED} at most"):
        labeller(tiny_checkpoint(), MOST_LABELLED + 1, seed=0)


def test_weights_tied_to_places_are_refused_in_words(tmp_path: Path) -> None:
    method = replace(TINY_METHOD, attfex="positional", classifier_start="prototypes")
    tied = replace(tiny_checkpoint(), recipe=replace(TINY_RECIPE, method=method))
    with pytest.raises(TridentError, match="no positions"):
        labeller(tied, 6, seed=0)
    started = start_run(tied.recipe, tiny_store(), "noise", tmp_path / "run", "cpu")
    save_checkpoint(tmp_path / "tied.safetensors", started)
    with pytest.raises(TridentError, match="no positions"):  # before a page is served
        WeightStore(str(tmp_path / "tied.safetensors"))


@pytest.mark.parametrize("which", Temperatures._fields)
def test_a_temperature_scales_log_probabilities_and_changes_no_label(which: str) -> None:
    plain, pile = labeller(tiny_checkpoint(), 6, seed=1)
    temperatures = Temperatures()._replace(**{which: 1.7})
    warm = replace(plain, checkpoint=replace(plain.checkpoint, temperatures=temperatures))

    def say(one: Labeller) -> np.ndarray:
        if which == "alone":
            return one.probabilities_alone(pile)
        return one.probabilities(pile if which == "few" else np.tile(pile, (2, 1, 1, 1)))

    powers = say(plain) ** (1 / 1.7)
    np.testing.assert_allclose(say(warm), powers / powers.sum(1, keepdims=True), rtol=1e-6)
    assert (say(warm).argmax(1) == say(plain).argmax(1)).all()
    assert (say(warm).max(1) < say(plain).max(1)).all()


def test_measuring_knows_no_temperature(tmp_path: Path) -> None:
    first = start_run(TINY_RECIPE, tiny_store(), "noise", tmp_path / "run", "cpu")
    results = [
        evaluate(replace(first, temperatures=Temperatures(t, t, t)), tiny_store(), split="val", tasks=4, seed=0)
        for t in (1.0, 3.0)
    ]
    first_said, second_said = (result.predictions.log_probabilities for result in results)
    np.testing.assert_array_equal(first_said, second_said)


def store_with_mistakes() -> ImageStore:
    """A fifth of its images are of another class than their label says, so that nobody can be right always."""
    store, generator = tiny_store(), np.random.default_rng(0)
    images = np.array(store.images)
    some = generator.permutation(len(images))[: len(images) // 5]
    images[some] = images[generator.permutation(some)]
    return store_in_memory(store.dataset, images, store.classes)


@pytest.mark.parametrize("inner_steps", [0, 2])
def test_export_keeps_temperatures_or_fits_them(
    inner_steps: int, trident_here: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = store_with_mistakes()
    write_store(tmp_path / "noise.store", "noise", store.classes, iter(store.images))
    method = replace(USUAL, inner_steps=inner_steps, refinements=2)
    recipe = replace(tiny_checkpoint(method).recipe, episode=replace(TINY_RECIPE.episode, n_query=4))
    first = start_run(recipe, store, "noise", tmp_path / "run", "cpu")
    assert first.temperatures == (1, 1, 1)
    wider = {key: 30 * value for key, value in first.parameters.items() if key.startswith("classifier.0.")}
    first = replace(first, parameters=first.parameters | wider, running=narrow(first.running))
    kept = Temperatures(1.25, 1.375, 1.5)
    save_checkpoint(tmp_path / "run" / "best.safetensors", replace(first, temperatures=kept))
    assert trident_here("export", "run", "--to", "kept.safetensors").returncode == 0
    assert load_checkpoint(tmp_path / "kept.safetensors").temperatures == kept
    call = ("export", "run", "--to", "fitted.safetensors", "--fit-temperature", "--data", "noise.store", "--tasks", "5")
    fitted = trident_here(*call)
    assert fitted.returncode == 0, fitted.stderr
    unrefined = replace(recipe, method=replace(method, refinements=0))
    by_two = replace(unrefined, episode=replace(recipe.episode, n_query=2))
    by_one = replace(unrefined, protocol=replace(recipe.protocol, queries_at_once="one", batch_norm="running"))

    def expected(of: Recipe) -> float:
        return fit_temperature(evaluate(replace(first, recipe=of), store, split="val", tasks=5, seed=0).predictions)

    wanted = [expected(recipe)] * 3  # to classify pictures alone takes too long with inner steps
    if not inner_steps:
        wanted = [expected(recipe), expected(by_two), expected(by_one)]
        assert min(abs(one - other) for one, other in itertools.combinations(wanted, 2)) > 0.01
    found = load_checkpoint(tmp_path / "fitted.safetensors").temperatures
    assert found == pytest.approx(wanted, abs=1e-3)
    assert f"temperatures {found[0]:.3f} (many), {found[1]:.3f} (few), {found[2]:.3f} (alone)" in fitted.stdout
    assert_one_line_error(trident_here("export", "run", "--to", "x", "--data", "noise.store"), "--fit-temperature")
    save_checkpoint(tmp_path / "odd.safetensors", replace(first, temperatures=Temperatures(many=-1.0)))
    with pytest.raises(TridentError, match=r"odd.safetensors is damaged: .*temperature -1"):
        load_checkpoint(tmp_path / "odd.safetensors")


def test_shipped_weights_have_the_temperatures_of_their_card(trident_here: Callable) -> None:
    entries = json.loads(trident_here("weights", "--json").stdout)
    listed = {entry["name"]: entry["temperatures"] for entry in entries}
    for name in weight_names():
        assert set(listed[name]) == {"many", "few", "alone"}
        for temperature in listed[name].values():
            assert temperature != 1
            assert f"temperature {temperature:.3f} fitted on" in card_of(name)
    assert {weights_for(5, 5), weights_for(25, 5)} <= set(listed)
