"""The networks of the page: features of a frozen backbone, or weights of Conv4."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trident.backbones.conv4 import conv4_of
from trident.backbones.pretrained import BATCH, INCLUDED, Pretrained, find_backbone
from trident.backbones.python_function import UNKNOWN
from trident.data.images import key_of
from trident.errors import TridentError
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.label_latents import latents_for
from trident.labelling.labelled import Labelled
from trident.labelling.labeller import Labeller, refuse_positional
from trident.labelling.making import CONV4, HINT, chosen_backbone
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.learning.frozen_weights import with_conv4
from trident.web.limits import MEGA, Check
from trident.web.uploads import Upload
from trident.weights import weight_names, weights_for


class FeatureMemory:
    """Features of the pictures that were sent last, in memory only, so that labelling again takes no time.

    Up to `limit` bytes. Features that were not used for longest are forgotten first. For one thread.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._known: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> np.ndarray | None:
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def put(self, key: bytes, features: np.ndarray) -> None:
        self._bytes += features.nbytes - (self._known[key].nbytes if key in self._known else 0)
        self._known[key] = features.copy()  # a part of an array would keep the whole array in memory
        self._known.move_to_end(key)
        while self._bytes > self._limit:
            self._bytes -= self._known.popitem(last=False)[1].nbytes


MEMORY = 50 * MEGA  # bytes of features that are not forgotten


class FeatureNetwork:
    """Labels by the features of a frozen backbone. The pile is classified as a whole, and no features are on disk."""

    channels = 3
    reduced = True  # as `trident predict` decodes for backbones

    def __init__(self, backbone: Pretrained, hint: str | None = None):
        self.hint = hint
        kind, _, file = backbone.name.partition(":")
        if kind == "onnx":  # without folders: visitors do not see the server's paths
            backbone = replace(backbone, name=f"onnx:{Path(file).name}")
        elif kind == "weights" and Path(file).name != file:  # not to be taken for included weights
            backbone = replace(backbone, name=f"weights of {Path(file).name}")
        self._backbone = backbone
        self._memory = FeatureMemory(MEMORY)
        self.size, self.centre_crop = backbone.facts.image_size, backbone.facts.centre_crop
        self._latents = latents_for(backbone.name)
        # The first batch takes seconds longer than others: better now than with the first visitor.
        self._backbone.features(np.zeros((1, self.size, self.size, self.channels), np.uint8))

    def described(self) -> list[dict[str, Any]]:
        name, data = self._backbone.name, self._backbone.facts.trained_on
        described = {"name": name, "described": "" if data == UNKNOWN else f"trained on {data}", "size": self.size}
        return [described | {"features": True, "latents": False, "included": name == INCLUDED}]

    def described_for(self, upload: Upload) -> dict[str, Any]:
        return self.described()[0]

    def label(self, upload: Upload, check: Check) -> Labelled:
        labels, pile = upload.labels(), [got.pixels for got in upload.pile if got.pixels is not None]
        features = self._features([*upload.examples(), *pile], upload.tab, check)
        check()
        known, features = features[: len(labels)], features[len(labels) :]
        labeller = FeatureLabeller(self._backbone, tuple(upload.classes), known, labels, self._latents)
        failures = {place: got.error or "" for place, got in enumerate(upload.pile) if got.pixels is None}
        return labeller.label_features(features).with_failures(failures)

    def _features(self, pictures: Sequence[np.ndarray], tab: str, check: Check) -> np.ndarray:
        """(picture, feature). Those that the same tab sent before are not computed again."""
        features = np.zeros((len(pictures), self._backbone.n_features), np.float32)
        # The tab is a part of the key, so nobody can find out what others have sent.
        keys = [key_of(tab.encode(), pixels.tobytes()) if tab else b"" for pixels in pictures]
        missing = []
        for place, key in enumerate(keys):
            known = self._memory.get(key) if key else None
            if known is None:
                missing.append(place)
            else:
                features[place] = known
        for start in range(0, len(missing), BATCH):
            check()
            batch = missing[start : start + BATCH]
            features[batch] = self._backbone.features(np.stack([pictures[place] for place in batch]))
            for place in batch:
                if keys[place]:
                    self._memory.put(keys[place], features[place])
        return features


_MANY = 1000


class WeightStore:
    """Labels by weights of Conv4, which are read once. The pile is classified in chunks."""

    centre_crop = 1.0
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

    def label(self, upload: Upload, check: Check) -> Labelled:
        # Includes unreadable pictures, as `trident predict` does, so that chunks and labels are the same.
        return self.labeller(upload).label(upload.pile, lambda done, total: check())

    def labeller(self, upload: Upload) -> Labeller:
        labels = upload.labels()
        _, checkpoint = self.fitting(len(labels), len(upload.classes))
        return Labeller(checkpoint, tuple(upload.classes), np.stack(upload.examples()), labels, self._device)

    def described_for(self, upload: Upload) -> dict[str, Any]:
        return describe(*self.fitting(len(upload.labels()), len(upload.classes)))

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


# What the server labels pictures with. It is loaded once, when the server starts.
Network = FeatureNetwork | WeightStore


def open_network(backbone: str, weights: str, device: str) -> Network:
    """Chooses as `trident predict` does. Whoever runs the server is told if pretrained features would be better."""
    chosen = chosen_backbone(backbone, weights)
    if chosen == CONV4:
        return WeightStore(weights, device)
    return FeatureNetwork(find_backbone(chosen, device), HINT if (backbone, chosen) == ("auto", INCLUDED) else None)
