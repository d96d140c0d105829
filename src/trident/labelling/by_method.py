"""A labeller for a method of the user's choice."""

from collections.abc import Mapping, Sequence

from trident.data.images import ImageSource
from trident.errors import TridentError
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.labelled import PictureLabeller
from trident.labelling.making import CONV4, chosen_backbone, feature_labeller, labeller_of
from trident.learning.checkpoint import load_checkpoint, recipe_of_weights, with_method
from trident.methods.base import HeadOnFeatures
from trident.methods.registry import method_class, method_name
from trident.weights import FEW_SHOTS, weight_names

SAME_NETWORK = {"baseline": "simpleshot"}  # methods that are trained in the same way, so one file serves both


def labeller_by_method(
    by_class: Mapping[str, Sequence[ImageSource]],
    name: str,
    backbone: str = "auto",
    device: str = "cpu",
    cache: FeatureCache | None = None,
) -> PictureLabeller:
    """Methods without training classify features of the backbone; others use their included weights."""
    kind = method_class(name)
    if kind.about.trained_on == "nothing" and issubclass(kind, HeadOnFeatures):
        if backbone == CONV4:
            raise TridentError(f"{name} needs features that are the same in every pile: omit --backbone conv4")
        return feature_labeller(by_class, chosen_backbone(backbone, "auto"), device, cache, kind())
    if backbone not in ("auto", CONV4):
        raise TridentError(f"{name} has weights for conv4 only: omit --backbone")
    weights = _weights_of(SAME_NETWORK.get(name, name), sum(map(len, by_class.values())), len(by_class))
    return labeller_of(with_method(load_checkpoint(weights), name), by_class, device)


def _weights_of(name: str, n_pictures: int, n_classes: int) -> str:
    """The included weights of a method that suit so many labelled photographs."""
    recipes = {weights: recipe_of_weights(weights) for weights in weight_names() if weights.startswith("mini-")}
    found = [
        weights
        for weights, recipe in recipes.items()
        if method_name(recipe.method) == name and not recipe.method.positional
    ]
    few = n_pictures <= FEW_SHOTS * n_classes
    found.sort(key=lambda weights: (few != (recipes[weights].episode.n_shot == 1), len(weights)))
    if not found:
        raise TridentError(
            f"{name} has to be trained and no weights of it are installed: 'pip install ./packages/weights' in a clone "
            "of trident has those of most methods; or train it with 'trident train' and give --weights RUN instead of "
            "--method"
        )
    return found[0]
