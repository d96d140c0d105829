"""Labels by the features of a frozen backbone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trident.backbones.pretrained import BATCH, INCLUDED, Pretrained
from trident.backbones.python_function import UNKNOWN
from trident.data.images import key_of
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.label_latents import latents_for
from trident.labelling.labelled import Labelled
from trident.web.feature_memory import FeatureMemory
from trident.web.labels import Task
from trident.web.limits import MEGA
from trident.web.request_queue import Check

MEMORY = 50 * MEGA  # bytes of features that are not forgotten


class FeatureNetwork:
    """The pile is classified as a whole. Features are not kept on disk."""

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
        self.size, self.middle = backbone.facts.image_size, backbone.facts.middle
        self._latents = latents_for(backbone.name)
        # The first batch takes seconds longer than others: better now than with the first visitor.
        self._backbone.features(np.zeros((1, self.size, self.size, self.channels), np.uint8))

    def described(self) -> list[dict[str, Any]]:
        facts = self._backbone.facts
        return [
            {
                "name": self._backbone.name,
                "described": "" if facts.trained_on == UNKNOWN else f"trained on {facts.trained_on}",
                "size": self.size,
                "features": True,
                "latents": False,
                "included": self._backbone.name == INCLUDED,
            }
        ]

    def described_for(self, task: Task) -> dict[str, Any]:
        return self.described()[0]

    def label(self, task: Task, check: Check) -> Labelled:
        n, pile = len(task.examples), [got.pixels for got in task.upload.pile if got.pixels is not None]
        features = self._features([*task.examples, *pile], task.upload.tab, check)
        check()
        labeller = FeatureLabeller(self._backbone, task.classes, features[:n], task.labels, self._latents)
        found = labeller.label_features(features[n:])
        failures = {place: got.error or "" for place, got in enumerate(task.upload.pile) if got.pixels is None}
        return found.with_failures(failures)

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
