"""Labels by weights of Conv4, which are read once."""

from pathlib import Path
from typing import Any

import numpy as np

from trident.backbones.conv4 import conv4_of
from trident.labelling.labelled import Labelled
from trident.labelling.labeller import Labeller, label_pile, refuse_positional
from trident.learning.checkpoint import load_checkpoint
from trident.web.labels import Task, held
from trident.web.request_queue import Check
from trident.weights import DEFAULT_WEIGHTS, weight_names


class WeightStore:
    """The pile is classified in chunks."""

    middle = 1.0
    reduced = False  # as `trident predict` decodes for Conv4

    def __init__(self, weights: str = "auto", device: str = "cpu", hint: str | None = None):
        """`weights`: a name or a path; `auto`: the included ones."""
        self._device, self.hint = device, hint
        # Without folders: visitors do not see the server's paths.
        self.name = DEFAULT_WEIGHTS if weights == "auto" else Path(weights).stem
        self._checkpoint = load_checkpoint(DEFAULT_WEIGHTS if weights == "auto" else weights)
        refuse_positional(self._checkpoint.recipe.method)
        backbone = conv4_of(self._checkpoint.recipe.backbone, "the page")
        self.size, self.channels = backbone.image_size, backbone.image_channels

    def label(self, task: Task, check: Check) -> Labelled:
        # Includes unreadable pictures, as `trident predict` does, so that chunks and labels are the same.
        return label_pile(self.labeller(task), held(task.upload), lambda done, total: check())

    def labeller(self, task: Task) -> Labeller:
        return Labeller(self._checkpoint, task.classes, np.stack(task.examples), task.labels, self._device)

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "described": self._checkpoint.described(),
            "size": self.size,
            "features": False,
            "latents": "latents" in self._checkpoint.recipe.method.about.analyses,
            "included": self.name in weight_names(),
        }
