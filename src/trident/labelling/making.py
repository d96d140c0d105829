"""From a user's choices to a labeller: pretrained features if they are installed, otherwise included ones."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from trident.backbones.conv4 import conv4_of
from trident.backbones.pretrained import BACKBONES, DEFAULT, INCLUDED, find_backbone
from trident.data.images import ImageSource
from trident.errors import TridentError
from trident.labelling.feature_cache import FeatureCache, cache_folder
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.inputs import Given, Say, in_classes, new_classes
from trident.labelling.label_latents import latents_for
from trident.labelling.labeller import Labeller, read_labelled
from trident.labelling.picture_features import readable_features
from trident.labelling.saved import load_classifier
from trident.learning.checkpoint import Checkpoint, load_checkpoint, recipe_of_weights, with_method
from trident.learning.frozen_weights import with_conv4
from trident.methods.base import HeadOnFeatures
from trident.methods.registry import method_class, method_name
from trident.weights import FEW_SHOTS, weight_names, weights_for

PictureLabeller = FeatureLabeller | Labeller
CONV4 = "conv4"
HINT = "better labels: pretrained features, by pip install -e '.[features]' in a clone of trident (docs/backbones.md)"


def chosen_backbone(backbone: str, weights: str) -> str:
    """The backbone's name; auto: pretrained features if they are installed, conv4 if weights are given."""
    if backbone not in ("auto", CONV4) and weights != "auto":
        raise TridentError(
            f"weights {weights} have a backbone of their own: give them or the backbone {backbone}, not both"
        )
    if backbone != "auto":
        return backbone
    if weights != "auto":
        return CONV4
    return DEFAULT if BACKBONES[DEFAULT].installed else INCLUDED


def open_cache(wanted: bool = True, say: Callable[[str], object] = warnings.warn) -> FeatureCache | None:
    return FeatureCache(cache_folder(), say=say) if wanted else None


SAME_NETWORK = {"baseline": "simpleshot"}  # methods that are trained in the same way, so one file serves both


def make_labeller(
    by_class: Mapping[str, Sequence[ImageSource]],
    backbone: str = "auto",
    weights: str | Path = "auto",
    device: str = "cpu",
    cache: FeatureCache | None = None,
    method: str | None = None,
) -> PictureLabeller:
    """A labeller from pictures of each class. A labelled picture that cannot be read is an error.

    `method`: the name of another one than the default, which also takes label latents. Methods without training
    classify features of the backbone; others use their included weights.
    """
    head: HeadOnFeatures | None = None
    if method is not None:
        kind = method_class(method)
        if kind.about.trained_on != "nothing" or not issubclass(kind, HeadOnFeatures):
            if backbone not in ("auto", CONV4):
                raise TridentError(f"{method} has weights for conv4 only: omit --backbone")
            included = load_checkpoint(_weights_of(SAME_NETWORK.get(method, method), by_class))
            return _by_weights(with_method(included, method), by_class, device)
        if backbone == CONV4:
            raise TridentError(f"{method} needs features that are the same in every pile: omit --backbone conv4")
        head = kind()
    chosen = chosen_backbone(backbone, str(weights))
    if chosen == CONV4:
        return _by_weights(load_checkpoint(fitting_weights(weights, by_class)), by_class, device)
    network = find_backbone(chosen, device)
    features = readable_features(network, [source for some in by_class.values() for source in some], cache)
    labels = np.repeat(np.arange(len(by_class)), [len(some) for some in by_class.values()]).astype(np.int64)
    latents = latents_for(network.name) if head is None else None
    return FeatureLabeller(network, tuple(by_class), features, labels, latents, head, cache)


def fitting_weights(weights: str | Path, by_class: Mapping[str, Sequence[ImageSource]]) -> str | Path:
    """auto: those for the number of labelled pictures."""
    return weights_for(sum(map(len, by_class.values())), len(by_class)) if weights == "auto" else weights


def _by_weights(weights: Checkpoint, by_class: Mapping[str, Sequence[ImageSource]], device: str) -> Labeller:
    checkpoint = with_conv4(weights)
    conv4 = conv4_of(checkpoint.recipe.backbone, "labelling with trained weights")
    return Labeller(checkpoint, *read_labelled(by_class, conv4.image_size, conv4.image_channels), device)


def _weights_of(name: str, by_class: Mapping[str, Sequence[ImageSource]]) -> str:
    """The included weights of a method that suit so many labelled photographs."""
    few = sum(map(len, by_class.values())) <= FEW_SHOTS * len(by_class)
    recipes = [(weights, recipe_of_weights(weights)) for weights in weight_names() if weights.startswith("mini-")]
    fitting = [
        (few != (recipe.episode.n_shot == 1), len(weights), weights)
        for weights, recipe in recipes
        if method_name(recipe.method) == name and not recipe.method.positional
    ]
    if not fitting:
        raise TridentError(
            f"{name} has to be trained and no weights of it are installed: 'pip install ./packages/weights' in a clone "
            "of trident has those of most methods; or train it with 'trident train' and give --weights RUN instead of "
            "--method"
        )
    return min(fitting)[2]


def labeller_from(
    given: Given,
    model: Path | None,
    backbone: str,
    weights: str,
    device: str,
    use_cache: bool,
    say: Say,
    method: str | None = None,
) -> PictureLabeller:
    """Makes the labeller, of a saved classifier or of pictures. Says what it is, and what would be better."""
    if model is not None and backbone == CONV4:
        raise TridentError("--backbone conv4: a saved classifier needs the backbone that it was made with: omit it")
    chosen = backbone if model is not None or method is not None else chosen_backbone(backbone, weights)
    conv4 = method is None and chosen == CONV4
    cache = open_cache(use_cache and not conv4, lambda line: say(f"trident: {line}"))
    if cache is not None and cache.problem is not None:
        say(f"trident: features are not kept: {cache.problem}")
    by_class = in_classes(given)
    if model is not None:
        saved = load_classifier(model, device, None if backbone == "auto" else backbone, cache)
        new = new_classes(by_class, saved.classes)
        saved = saved.with_pictures(by_class)
        say(f"{model}: {saved.describe()}, {len(saved.classes)} classes{new}")
        return saved
    labeller = make_labeller(by_class, chosen, weights, device, cache, method)
    say((f"weights: {Path(fitting_weights(weights, by_class)).stem}, " if conv4 else "") + labeller.describe())
    if isinstance(labeller, Labeller) and method is not None and not labeller.calibrated:
        say("its probabilities are not calibrated: they may be too sure, or not sure enough")
    if method is None and backbone == "auto" and chosen == INCLUDED:
        say(HINT)
    return labeller
