"""Caches the features of each image, for models in which no image changes the features of another.

An image occurs in many tasks, so the cache saves most of the work of measuring on a CPU.
"""

import numpy as np
import torch
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.pretrained import BATCH, Compute, in_batches
from trident.data.store import ImageStore, positions_of
from trident.engines.execution import Execution
from trident.methods.base import HeadOnFeatures
from trident.recipes.recipe import Recipe
from trident.settings import Views
from trident.tasks.images import Images
from trident.tasks.views import views_of

MOST_BYTES = 2 * 2**30  # of the features of all images
BYTES_PER_NUMBER = 4


def can_be_cached(recipe: Recipe, execution: Execution, n_images: int) -> bool:
    """Whether an image has the same features in every task, and caching those of `n_images` images pays off.

    On a GPU it does not: computing them again is as fast as looking them up.
    """
    backbone = recipe.backbone
    # In a backbone of another package, an image's features may depend on the task.
    if type(backbone) is not Conv4Backbone or not isinstance(recipe.method, HeadOnFeatures):
        return False
    size = BYTES_PER_NUMBER * n_images * recipe.views.number * backbone.n_features
    on_cpu = torch.device(execution.device).type == "cpu"
    return recipe.protocol.batch_norm == "running" and on_cpu and size <= MOST_BYTES


class CachedFeatures(Images):
    """The features of the images of one split, in some views. Each is computed at its first use, then cached.

    Several threads may use it at the same time. Two of them may compute the same features; the results are equal.
    """

    def __init__(self, store: ImageStore, split: str, compute: Compute, n_features: int, views: Views):
        super().__init__(store, "cpu")
        self.compute = compute
        self.views = views
        positions = positions_of(store.classes_of(split))
        self._row_of = np.full(len(store.images), len(positions))  # of `_features`; too large in other splits
        self._row_of[positions] = np.arange(len(positions))
        self._known = np.zeros(len(store.images), bool)
        self._features = np.empty((len(positions), views.number * n_features), np.float32)

    def at(self, positions: np.ndarray) -> Tensor:
        """(...) -> (..., view * feature) float32."""
        needed = np.unique(positions)
        missing = needed[~self._known[needed]]
        for start in range(0, len(missing), BATCH):
            part = missing[start : start + BATCH]
            self.store.check(part)
            self._features[self._row_of[part]] = self._computed(np.asarray(self.store.images[part]))
            self._known[part] = True
        return torch.from_numpy(self._features[self._row_of[positions]])

    def _computed(self, images: np.ndarray) -> np.ndarray:
        shown = views_of(torch.from_numpy(images)[None], self.views)  # (1, image, size, size, channel) each
        return np.concatenate([in_batches(self.compute, view[0].numpy()) for view in shown], 1)
