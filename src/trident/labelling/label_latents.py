"""TRIDENT's label latents of features, by the trained weights that come with the package.

They take the place of the features when pictures are compared. `docs/results.md` tells what this is worth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from trident.backbones.frozen import FrozenBackbone
from trident.learning.checkpoint import load_checkpoint
from trident.methods.base import HeadModel
from trident.methods.trident.features import IMAGES_AT_ONCE, TridentOnFeatures, scaled
from trident.nn.parameters import Parameters
from trident.recipes.loading import load_recipe
from trident.tasks.task import Task

WEIGHTS = "features-trident"
Transform = Callable[[np.ndarray], None]  # features (picture, feature) become label latents, in place to save memory


@dataclass(frozen=True)
class LabelLatents:
    """A trained `TridentOnFeatures`. What it makes of a picture depends on the labelled pictures, on no others."""

    method: TridentOnFeatures  # with mask_from="support"
    parameters: Parameters  # with the statistics of its training

    def for_labelled(self, features: np.ndarray, labels: np.ndarray, n_classes: int) -> Transform | None:
        """For these labelled pictures (picture, feature); None if they resemble no training images."""
        images = torch.from_numpy(features).double()[None]
        task = Task(images, torch.from_numpy(labels)[None], n_classes)
        parameters = {key: value.double() for key, value in self.parameters.items()}
        trust = self.method.trust(parameters, images, task)  # (1, 1, 1)
        if not trust.any():
            return None
        mask = self.method.mask(parameters, scaled(images), task)  # (1, 1, feature)

        def overwrite(rows: np.ndarray) -> None:
            images = torch.from_numpy(rows)[None]
            own = {key: value.to(images) for key, value in parameters.items()}
            with torch.no_grad():
                for start in range(0, len(rows), IMAGES_AT_ONCE):
                    part = images[:, start : start + IMAGES_AT_ONCE]
                    latents = self.method.infer(own, scaled(part), mask.to(images), trust.to(images), {})
                    part.copy_(latents.label.loc)

        return overwrite


@cache
def latents_for(backbone: str) -> LabelLatents | None:
    """The label latents that were trained on features of this backbone; None if there are none."""
    trained = load_recipe(WEIGHTS).backbone
    assert isinstance(trained, FrozenBackbone)
    if trained.of != backbone:
        return None
    checkpoint = load_checkpoint(WEIGHTS)
    model, method = checkpoint.recipe.model, checkpoint.recipe.method.for_few_queries()
    assert isinstance(model, HeadModel)
    assert isinstance(method, TridentOnFeatures)
    return LabelLatents(method, model.with_running_statistics(checkpoint.parameters, checkpoint.running))
