"""What is measured: weights with changed settings, and a store that fits them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from trident.backbones.feature_store import features_of_store
from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import BACKBONES, find_backbone
from trident.data.store import SPLITS, ImageStore
from trident.engines.execution import usable_device
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.subject import needs_training_statistics
from trident.progress import Progress
from trident.recipes.loading import after_training, setting_of, setting_types, with_overrides
from trident.recipes.recipe import Recipe
from trident.weights import weight_names

Counting = Callable[[str], AbstractContextManager[Progress]]  # shows progress of work with this name


def with_settings(checkpoint: Checkpoint, settings: list[str]) -> Checkpoint:
    """Weights with other values of settings that may change after training."""
    recipe = with_overrides(checkpoint.recipe, settings)
    free = after_training(recipe)
    for key in setting_types(recipe):
        if key not in free and setting_of(recipe, key) != setting_of(checkpoint.recipe, key):
            own = ", ".join(sorted(name for name in free if name.startswith("method.")))
            raise TridentError(
                f"{key} cannot be changed once a model is trained; settings of episode, protocol and views can be"
                + (f", and {own}" if own else "")
            )
    recipe.method.check_episode(checkpoint.recipe.episode, recipe.episode)
    return replace(checkpoint, recipe=recipe)


def as_recipe_takes_it(
    recipe: Recipe, store: ImageStore, split: str | None, say: Callable[[str], None], counting: Counting
) -> ImageStore:
    """The store as the recipe takes it. If it takes features of other weights of ours, those are computed.

    Stored features must be those of the backbone as it is now, unless a run has recorded its fingerprint. `split`: the
    only one that is measured.
    """
    backbone = recipe.backbone
    if not isinstance(backbone, FrozenBackbone) or store.features_of not in ("", backbone.of):
        return store  # what does not fit is reported by the backbone
    if store.features_of:
        if not store.features_fingerprint and backbone.of not in BACKBONES:
            say(
                f"The store of {store.dataset} does not record which version of {backbone.of} made it, so a change of "
                f"{backbone.of} would not be noticed. Make it again to be sure."
            )
        elif not backbone.fingerprint and backbone.of.startswith("python:"):
            backbone.check_store(store)
            stored = f"The features of {backbone.of} in the store of {store.dataset}"
            say(f"{stored} are not compared: python: backbones are not run here.")
        elif not backbone.fingerprint and _is_here(backbone.of):
            replace(backbone, fingerprint=find_backbone(backbone.of).network_fingerprint).check_store(store)
        return store
    if not backbone.of.startswith("weights:"):
        return store
    splits = {split, "train"} if needs_training_statistics(recipe) else {split}
    network = find_backbone(backbone.of, usable_device("auto"))
    with counting("computing features") as progress:
        return features_of_store(store, network, progress, [one for one in SPLITS if split is None or one in splits])


def _is_here(backbone: str) -> bool:
    """Whether there is a file of weights, and what is needed to read it."""
    prefix, _, name = backbone.partition(":")
    there = prefix in ("weights", "onnx") and (Path(name).exists() or name in weight_names())
    return there and (prefix == "weights" or find_spec("onnxruntime") is not None)
