"""Labels a pile of pictures by the features of a frozen backbone. The whole pile is looked at together.

The features of a picture do not depend on other pictures, so the order of the pile does not matter, and features can
be cached. Pictures that are not typical of any class (see `typicality.py`) do not move the class means, and are
classified alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from trident.backbones.pretrained import INCLUDED, Pretrained
from trident.data.images import ImageSource
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.label_latents import LabelLatents, Transform
from trident.labelling.labelled import Labelled, check_labels
from trident.labelling.picture_features import features_of, readable_features
from trident.labelling.typicality import LEAST_TYPICAL, normalise_in_place, normalised, typicality
from trident.measuring.calibration import softmax
from trident.methods.base import HeadOnFeatures
from trident.methods.metric.nearest_mean import NearestMean
from trident.methods.metric.scikit_learn import LogisticRegressionHead
from trident.methods.transductive.soft_kmeans import SoftKMeans
from trident.progress import Progress
from trident.tasks.task import Task

MOST_LABELLED = 100_000
_MOST_FOR_REGRESSION = 2000  # labelled pictures
ENOUGH_TOGETHER = 4  # pictures for each class; in smaller piles each picture is classified alone
_AT_ONCE = 4096  # pictures computed at once, when each is classified alone


class Fitted(NamedTuple):
    """Logarithms of temperatures: a constant, what is added for each unit of log(shots), and of the mean similarity."""

    alone: tuple[float, float]
    together: tuple[float, float, float]
    nearest_mean: tuple[float, float] = (0.208, -0.239)  # for single pictures, if there are many labelled ones


# Fitted by tools/measure_labelling.py on tasks of CUB's validation classes, DTD and RSSCN7 with 1 to 20 shots, balanced
# and not; that of nearest mean earlier, on EfficientNet-Lite0's features without label latents. They change no label.
_FITTED_TO_LITE0 = Fitted((-1.464, 0.242), (1.650, -0.342, -2.314))  # for users' own backbones, too
_FITTED = {INCLUDED: Fitted((-1.037, 0.159), (1.425, -0.310, -0.402))}


@dataclass(frozen=True)
class FeatureLabeller:
    """A frozen backbone, the features of the labelled pictures, and the methods that classify others.

    With `latents`, the label latents of the features are classified instead of the features themselves.
    """

    backbone: Pretrained
    classes: tuple[str, ...]
    features: np.ndarray  # (picture, feature) float32, of the labelled pictures
    labels: np.ndarray  # (picture,) int64: indices into `classes`
    latents: LabelLatents | None = None
    method: HeadOnFeatures = field(default_factory=SoftKMeans)
    cache: FeatureCache | None = None

    def __post_init__(self) -> None:
        check_labels(self.classes, self.labels, MOST_LABELLED)

    def describe(self) -> str:
        latents = "TRIDENT's label latents, " if self._transform is not None else ""
        together, alone = self.method.about.title.lower(), self.method_alone.about.title.lower()
        enough = ENOUGH_TOGETHER * len(self.classes)
        return f"features of {self.backbone.name}, {latents}{together} (piles of fewer than {enough}: {alone})"

    @property
    def keeps_features(self) -> bool:
        """Whether features are cached, so that labelling that was stopped continues where it stopped."""
        return self.cache is not None and self.cache.problem is None

    def with_pictures(self, by_class: Mapping[str, Sequence[ImageSource]]) -> "FeatureLabeller":
        """A labeller with more labelled pictures, of these classes or of new ones. None counts twice in a class."""
        if not by_class:
            return self
        classes = tuple(dict.fromkeys([*self.classes, *by_class]))
        features, labels = [*self.features], [*self.labels]
        for name, sources in by_class.items():
            label = classes.index(name)
            known = {row.tobytes() for row in self.features[self.labels == label]}
            new = {row.tobytes(): row for row in self.raw_features(sources)}
            new = {content: row for content, row in new.items() if content not in known}
            features += new.values()
            labels += [label] * len(new)
        return replace(self, classes=classes, features=np.stack(features), labels=np.array(labels, np.int64))

    def label(self, pile: Sequence[ImageSource], progress: Progress | None = None, together: bool = True) -> Labelled:
        keys: dict[int, bytes] = {}
        features, failures = features_of(self.backbone, pile, self.cache, progress, keys)
        return replace(self.label_computed(features, failures, together), keys=keys)

    def label_computed(self, features: np.ndarray, failures: dict[int, str], together: bool = True) -> Labelled:
        """Label a pile whose features were computed, as `features_of` returns them. They are overwritten."""
        if failures:
            features = features[[place for place in range(len(features)) if place not in failures]]
        normalise_in_place(features)  # in place, because it may be a large part of the memory
        return self._label_normalised(features, together).with_failures(failures)

    def raw_features(self, pictures: Sequence[ImageSource]) -> np.ndarray:
        """Features (picture, feature). A picture that cannot be read is an error."""
        return readable_features(self.backbone, pictures, self.cache)

    def label_features(self, features: np.ndarray, together: bool = True) -> Labelled:
        """Label pictures by their features (picture, feature)."""
        return self._label_normalised(normalised(features), together)

    def _label_normalised(self, features: np.ndarray, together: bool) -> Labelled:
        if not len(features):
            return Labelled(self.classes, np.zeros((0, len(self.classes))))
        typical = typicality(self.unit_features, self.labels, features, len(self.classes), together)
        taking_part = np.ones(len(features), bool) if typical is None else typical >= LEAST_TYPICAL
        probabilities = np.zeros((len(features), len(self.classes)))
        if together and taking_part.sum() >= ENOUGH_TOGETHER * len(self.classes):
            places = np.flatnonzero(taking_part)
            places = places[_order(features[places])]
            logits = self._logits_at(self.method, features, places)
            probabilities[places] = softmax(logits / self._temperature_together(logits))
        else:
            taking_part[:] = False
        if not taking_part.all():
            logits = self.logits(features[~taking_part], together=False)
            probabilities[~taking_part] = softmax(logits / self._temperature_alone)
        return Labelled(self.classes, probabilities, typicality=typical, least_typical=LEAST_TYPICAL)

    def logits(self, features: np.ndarray, together: bool = True) -> np.ndarray:
        """Features of unit length (picture, feature) -> (picture, class) float64, before the temperature."""
        everything = np.arange(len(features))
        if together:
            return self._logits_at(self.method, features, everything)
        parts = np.split(everything, range(_AT_ONCE, len(features), _AT_ONCE))
        # 64 bits, so that even rounding does not depend on the other pictures.
        return np.concatenate([self._logits_at(self.method_alone, features, part, np.float64) for part in parts])

    def _logits_at(
        self,
        method: HeadOnFeatures,
        features: np.ndarray,
        places: np.ndarray,
        bits: type[np.floating[Any]] = np.float32,
    ) -> np.ndarray:
        """Logits of the pictures at these places."""
        n_labelled = len(self.labels)
        rows: np.ndarray = np.empty((n_labelled + len(places), features.shape[1]), bits)
        rows[:n_labelled] = self._labelled
        pile = rows[n_labelled:]
        if bits == features.dtype:
            np.take(features, places, 0, pile, "clip")  # without a copy; "raise" would make one
        else:
            pile[:] = features[places]
        if self._transform is not None:
            self._transform(pile)
        images = torch.from_numpy(rows)[None]
        task = Task(images, torch.from_numpy(self.labels)[None], len(self.classes))
        with torch.no_grad():
            return np.asarray(method.head({}, images, task)[0].double().numpy())

    @cached_property
    def _transform(self) -> Transform | None:
        return self.latents.for_labelled(self.unit_features, self.labels, len(self.classes)) if self.latents else None

    @cached_property
    def _labelled(self) -> np.ndarray:
        """What the labelled pictures are compared by: (picture, feature) float64."""
        rows = self.unit_features.astype(np.float64)
        if self._transform is not None:
            self._transform(rows)
        return rows

    @cached_property
    def unit_features(self) -> np.ndarray:
        return normalised(self.features)

    @property
    def method_alone(self) -> HeadOnFeatures:
        """For single pictures: logistic regression is a little better, but takes long with many labelled pictures."""
        return LogisticRegressionHead() if len(self.labels) <= _MOST_FOR_REGRESSION else NearestMean()

    @property
    def _shots(self) -> float:
        return len(self.labels) / len(self.classes)

    @property
    def _fitted(self) -> Fitted:
        return _FITTED.get(self.backbone.name, _FITTED_TO_LITE0)

    @property
    def _temperature_alone(self) -> float:
        regression = isinstance(self.method_alone, LogisticRegressionHead)
        constant, slope = self._fitted.alone if regression else self._fitted.nearest_mean
        return math.exp(constant + slope * math.log(self._shots))

    @property
    def calibrated(self) -> bool:
        """Whether the temperatures were fitted for this method."""
        return isinstance(self.method, SoftKMeans)

    def _temperature_together(self, logits: np.ndarray) -> float:
        """Hard piles, whose pictures are not very similar to the class means, need a higher temperature."""
        if not isinstance(self.method, SoftKMeans):
            return 1.0
        scale = self.method.scale
        constant, slope, per_similarity = self._fitted.together
        similarity = float(logits.max(1).mean()) / scale
        at_default = math.exp(constant + slope * math.log(self._shots) + per_similarity * similarity)
        return at_default * scale / SoftKMeans().scale  # fitted with the default scale

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without cached values. `Pretrained` is pickled by its name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


def _order(features: np.ndarray) -> np.ndarray:
    """Indices that sort pictures by their features, so that rounding does not depend on the order of the pile."""
    rows = np.ascontiguousarray(features)
    return np.argsort(rows.view(np.dtype((np.void, rows.strides[0]))).ravel(), kind="stable")
