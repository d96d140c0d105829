"""Features that are computed once for each image, where no image changes the features of another.

An image occurs in many tasks, so this saves most of the work of measuring on a CPU.
"""

import numpy as np
import torch
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.pretrained import BATCH, Pretrained
from trident.data.store import ImageStore
from trident.engines.execution import Execution
from trident.methods.base import HeadOnFeatures
from trident.recipes.recipe import Recipe
from trident.settings import Views
from trident.tasks.images import Images
from trident.tasks.views import views_of


def sees_images_apart(recipe: Recipe, execution: Execution) -> bool:
    """Whether an image has the same features in every task, and they are worth keeping: a GPU computes them at once."""
    apart = recipe.protocol.batch_norm == "running" and isinstance(recipe.method, HeadOnFeatures)
    return apart and isinstance(recipe.backbone, Conv4Backbone) and torch.device(execution.device).type == "cpu"


def seen_images(store: ImageStore, network: Pretrained, views: Views) -> "SeenImages":
    """The latest ones are kept, because an audit measures the same weights on the same images several times."""
    key = (store.fingerprint, network.fingerprint, views)
    if key not in _latest:
        _latest.clear()
        _latest[key] = SeenImages(store, network, views)
    return _latest[key]


class SeenImages(Images):
    """The features of a store's images in some views, each image's computed when it is first asked for.

    Several threads may ask at the same time. Two of them may compute the same features, which come out the same.
    """

    def __init__(self, store: ImageStore, network: Pretrained, views: Views):
        super().__init__(store, "cpu")
        self.network = network
        self.views = views
        n_images = len(store.images)
        self._known = np.zeros(n_images, bool)
        # The system gives memory for those rows only that are written.
        self._features = np.empty((n_images, views.number * network.n_features), np.float32)

    def at(self, positions: np.ndarray) -> Tensor:
        """(...) -> (..., view * feature) float32."""
        asked = np.unique(positions)
        missing = asked[~self._known[asked]]
        for start in range(0, len(missing), BATCH):
            rows = missing[start : start + BATCH]
            self.store.check(rows)
            self._features[rows] = self._computed(np.asarray(self.store.images[rows]))
            self._known[rows] = True
        return torch.from_numpy(self._features[positions])

    def _computed(self, images: np.ndarray) -> np.ndarray:
        shown = views_of(torch.from_numpy(images)[None], self.views)  # (1, image, size, size, channel) each
        return np.concatenate([self.network.features(view[0].numpy()) for view in shown], 1)


_latest: dict[tuple[str, str, Views], SeenImages] = {}  # one at most
