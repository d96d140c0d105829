"""Labels a pile of pictures by the features of a frozen backbone. The whole pile is looked at together.

The features of a picture do not depend on other pictures, so the order of the pile does not matter, and features can
be cached. Pictures that are not typical of any class (see `typicality.py`) do not move the class means, and are
classified alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trident.backbones.pretrained import Pretrained
from trident.data.images import ImageSource
from trident.labelling.expecting import expected_accuracy
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.label_latents import LabelLatents, Transform
from trident.labelling.labelled import Labelled, check_labels
from trident.labelling.picture_features import features_of, readable_features
from trident.labelling.typicality import LEAST_TYPICAL, normalise_in_place, normalised, typicality
from trident.methods.base import HeadOnFeatures
from trident.methods.evidence.heads import logits_of_heads
from trident.methods.evidence.method import Judgement, canonical_order, judge
from trident.progress import Progress
from trident.tasks.task import Task

MOST_LABELLED = 100_000
ENOUGH_TOGETHER = 4  # pictures for each class; in smaller piles each picture is classified alone


@dataclass(frozen=True)
class FeatureLabeller:
    """A frozen backbone, and the features of the labelled pictures. Others are classified as in `methods/evidence`.

    With `latents`, heads that classify the label latents of the features are among those that are weighed.
    """

    backbone: Pretrained
    classes: tuple[str, ...]
    features: np.ndarray  # (picture, feature) float32, of the labelled pictures
    labels: np.ndarray  # (picture,) int64: indices into `classes`
    latents: LabelLatents | None = None
    method: HeadOnFeatures | None = None  # instead of several, weighed by evidence
    cache: FeatureCache | None = None

    def __post_init__(self) -> None:
        check_labels(self.classes, self.labels, MOST_LABELLED)

    def describe(self) -> str:
        latents = " and TRIDENT's label latents" if self._transform is not None else ""
        method = "heads weighed by the labelled pictures" if self.method is None else self.method.about.title.lower()
        return f"features of {self.backbone.name}{latents if self.method is None else ''}, {method}"

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
        together = together and taking_part.sum() >= ENOUGH_TOGETHER * len(self.classes)
        probabilities = np.zeros((len(features), len(self.classes)))
        expected = None
        for chosen, at_once in (
            [(taking_part, True), (~taking_part, False)] if together else [(taking_part | True, False)]
        ):
            places = np.flatnonzero(chosen)
            if len(places):
                places = places[canonical_order(features[places])]
                judgement = self.judge(features[places], at_once)
                probabilities[places] = judgement.log_probabilities.exp().numpy()
                expected = expected or expected_accuracy(judgement)
        return Labelled(self.classes, probabilities, typicality=typical, least_typical=LEAST_TYPICAL, expected=expected)

    def judge(self, features: np.ndarray, together: bool) -> Judgement:
        """Label pictures by features of unit length (picture, feature), and say what left-out labelled ones tell."""
        heads = logits_of_heads if self.method is None or not together else self._one_head
        support, pile = [self.unit_features], [features]
        if self._transform is not None:
            for rows in (support, pile):
                rows.append(rows[0].astype(np.float32 if together else np.float64))  # copies
                self._transform(rows[1])
                normalise_in_place(rows[1])
        return judge(
            [torch.from_numpy(rows) for rows in support],
            torch.from_numpy(self.labels),
            len(self.classes),
            [torch.from_numpy(rows) for rows in pile],
            together,
            heads,
        )

    def _one_head(self, support: Tensor, labels: Tensor, n_way: int, pile: Tensor, together: bool) -> dict[str, Tensor]:
        """The method that was asked for, in the place of the heads of evidence."""
        assert self.method is not None
        task = Task(torch.cat([support, pile])[None], labels[None], n_way)
        with torch.no_grad():
            return {"method": self.method.head({}, task.images, task)[0].double()}

    @cached_property
    def _transform(self) -> Transform | None:
        return self.latents.for_labelled(self.unit_features, self.labels, len(self.classes)) if self.latents else None

    @cached_property
    def unit_features(self) -> np.ndarray:
        return normalised(self.features)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without cached values. `Pretrained` is pickled by its name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}
