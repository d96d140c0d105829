"""The server's weights, read once."""

from pathlib import Path
from typing import Any

from trident.backbones.conv4 import conv4_of
from trident.errors import TridentError
from trident.labelling.labeller import refuse_positional
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.weights import weight_names, weights_for

_MANY = 1000


class WeightStore:
    def __init__(self, weights: str = "auto"):
        """`weights`: a name or a path; `auto`: chosen by the number of labelled pictures."""
        self._auto = weights == "auto"
        wanted = {weights_for(n, 1) for n in (1, _MANY)} if self._auto else {weights}
        self._known: dict[str, Checkpoint] = {}
        for name in sorted(wanted):
            checkpoint = load_checkpoint(name)
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

    def described(self) -> list[dict[str, Any]]:
        return [describe(name, checkpoint) for name, checkpoint in self._known.items()]


def describe(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "name": name,
        "described": checkpoint.described(),
        "size": conv4_of(checkpoint.recipe.backbone, "the page").image_size,
        "latents": "latents" in checkpoint.recipe.method.about.analyses,
        "included": name in weight_names(),
    }
