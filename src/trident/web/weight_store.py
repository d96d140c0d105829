"""Labels by weights of Conv4, which are read once."""

from pathlib import Path
from typing import Any

import numpy as np

from trident.backbones.conv4 import conv4_of
from trident.errors import TridentError
from trident.labelling.labelled import Labelled
from trident.labelling.labeller import Labeller, refuse_positional
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.learning.frozen_weights import with_conv4
from trident.web.labels import Task, decoded_pictures
from trident.web.request_queue import Check
from trident.weights import weight_names, weights_for

_MANY = 1000


class WeightStore:
    """The pile is classified in chunks."""

    middle = 1.0
    reduced = False  # as `trident predict` decodes for Conv4
    hint: str | None = None

    def __init__(self, weights: str = "auto", device: str = "cpu"):
        """`weights`: a name or a path; `auto`: chosen by the number of labelled pictures."""
        self._device = device
        self._auto = weights == "auto"
        wanted = {weights_for(n, 1) for n in (1, _MANY)} if self._auto else {weights}
        self._known: dict[str, Checkpoint] = {}
        for name in sorted(wanted):
            checkpoint = with_conv4(load_checkpoint(name))
            refuse_positional(checkpoint.recipe.method)
            # Without folders: visitors do not see the server's paths.
            self._known[name if self._auto else Path(name).stem] = checkpoint
        backbones = [conv4_of(known.recipe.backbone, "the page") for known in self._known.values()]
        shapes = {(backbone.image_size, backbone.image_channels) for backbone in backbones}
        if len(shapes) > 1:
            raise TridentError("these weights take pictures of different sizes: give one of them with --weights")
        self.size, self.channels = shapes.pop()

    def fitting(self, n_pictures: int, n_classes: int) -> tuple[str, Checkpoint]:
        if self._auto:
            name = weights_for(n_pictures, n_classes)
            return name, self._known[name]
        return next(iter(self._known.items()))

    def label(self, task: Task, check: Check) -> Labelled:
        # Includes unreadable pictures, as `trident predict` does, so that chunks and labels are the same.
        return self.labeller(task).label(decoded_pictures(task.upload), lambda done, total: check())

    def labeller(self, task: Task) -> Labeller:
        _, checkpoint = self._fitting(task)
        return Labeller(checkpoint, task.classes, np.stack(task.examples), task.labels, self._device)

    def described_for(self, task: Task) -> dict[str, Any]:
        return describe(*self._fitting(task))

    def _fitting(self, task: Task) -> tuple[str, Checkpoint]:
        return self.fitting(len(task.examples), len(task.classes))

    def described(self) -> list[dict[str, Any]]:
        return [describe(name, checkpoint) for name, checkpoint in self._known.items()]


def describe(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "name": name,
        "described": checkpoint.describe(),
        "size": conv4_of(checkpoint.recipe.backbone, "the page").image_size,
        "features": False,
        "latents": "latents" in checkpoint.recipe.method.about.analyses,
        "included": name in weight_names(),
    }
