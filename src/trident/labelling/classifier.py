"""`TridentClassifier`: few-shot labelling as a scikit-learn classifier."""

from pathlib import Path
from typing import Any, Self

import numpy as np

from trident.data.images import ImageSource, UnreadableImageError
from trident.data.pictures import sources_of
from trident.engines.execution import usable_device
from trident.errors import BadValueError, TridentError
from trident.labelling.class_names import check_one_class_each, class_name
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.labelled import Expected, Labelled
from trident.labelling.making import make_labeller, open_cache
from trident.labelling.saved import load_classifier, save_classifier
from trident.labelling.suggesting import suggest
from trident.labelling.typicality import normalised

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import assert_all_finite
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d
except ImportError as error:
    raise TridentError("TridentClassifier needs scikit-learn: pip install 'trident-fewshot[analysis]'") from error


class TridentClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Labels pictures from a few labelled ones.

    Images may be paths, PIL images, arrays or tensors (height, width, channel or channel first; uint8, or floating
    point from 0 to 1), in a list or as one array. Their middle square is scaled to the network's input size.
    Labels may be anything that can be sorted. Classes may have different numbers of pictures.

    `predict` and `predict_proba` classify each picture alone: its label does not depend on the others.
    `fit_predict` and `transduce_proba` classify pictures together, which is more accurate. The label of a picture then
    depends on the others. All of them are classified together; with `weights` or `backbone="conv4"`, in chunks of up to
    100.
    """

    def __init__(self, weights: str | Path = "auto", device: str = "auto", backbone: str = "auto", cache: bool = True):
        """Choose the network.

        `backbone`: a name from `trident backbones`; auto: efficientnet-lite0 if it is installed, otherwise
        weights:mini-ensemble; conv4 if `weights` are given.
        `weights`: for conv4, a name from `trident weights`, a run or a file; auto: by the number of labelled pictures.
        `cache`: keep features on disk, except with conv4 (see `trident data cache`).
        """
        self.weights = weights
        self.device = device
        self.backbone = backbone
        self.cache = cache

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array, tags.input_tags.string = False, True, True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Store the labelled pictures X and their labels y. The network is not trained further."""
        if y is None:
            raise BadValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: give one label per picture"
            )
        sources, shape = sources_of(X), np.asarray(y).shape
        if not shape or shape[0] != len(sources):
            raise BadValueError(f"{len(sources)} images came with labels of shape {shape}: give one label per image")
        if not sources:
            raise BadValueError("there are no images to learn from")
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        check_classification_targets(labels)
        classes = np.unique(labels)
        by_class: dict[str, list[ImageSource]] = {
            class_name(str(name)): [source for source, label in zip(sources, labels, strict=True) if label == name]
            for name in classes
        }
        if len(by_class) < len(classes):
            raise BadValueError("two labels differ only in their spaces or Unicode form: write both in the same way")
        check_one_class_each((one.key(), name, one.name) for name, some in by_class.items() for one in some)
        device = usable_device(self.device)
        labeller = make_labeller(by_class, self.backbone, self.weights, device, open_cache(self.cache))
        self.classes_, self.labeller_ = classes, labeller  # set only if nothing failed
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (image, class), each picture classified alone; classes as in `classes_`."""
        return self._labelled(X, together=False).probabilities

    def predict(self, X: Any) -> np.ndarray:
        """The most probable classes, each picture classified alone."""
        best = self.predict_proba(X).argmax(1)  # raises an error if it was not fitted
        return np.asarray(self.classes_[best])

    def transduce_proba(self, X: Any) -> np.ndarray:
        """Probabilities (image, class), all pictures classified together."""
        return self._labelled(X, together=True).probabilities

    def fit_predict(self, images: Any, labels: Any, queries: Any) -> np.ndarray:
        """Fit, then the most probable classes of the queries, classified together."""
        return np.asarray(self.fit(images, labels).classes_[self.transduce_proba(queries).argmax(1)])

    def expected_accuracy(self, X: Any) -> Expected | None:
        """The share of labels of `transduce_proba` that will be right, judged by leaving labelled pictures out.

        None if fewer than 4 labelled pictures can be left out: those of classes that have several. All backbones but
        conv4 can.
        """
        self._by_features()
        return self._labelled(X, together=True).expected

    def none_of_these(self, X: Any) -> np.ndarray:
        """Whether each picture belongs to none of the classes: (image,) bool. All backbones but conv4 can."""
        labelled = self._labelled(X, together=True)
        if labelled.typicality is None:
            raise BadValueError(
                "none_of_these needs another backbone than conv4, no weights, and at least 5 pictures in all: those "
                "given to it, and the labelled ones of classes that have several"
            )
        return np.asarray(labelled.typicality < labelled.least_typical)

    def suggest(self, X: Any, n: int = 10) -> np.ndarray:
        """Indices of the pictures to label next, the best first. All backbones but conv4 can."""
        labeller = self._by_features()
        sources = sources_of(X)
        features = normalised(labeller.raw_features(sources))
        return np.array(suggest(labeller.unit_features, features, labeller.label_features(features), n), np.int64)

    def save(self, path: str | Path) -> None:
        """Write the fitted classifier to a file that ends in .trident. Labels become text."""
        save_classifier(self._by_features(), Path(path))

    @classmethod
    def load(cls, path: str | Path, device: str = "auto", backbone: str = "auto", cache: bool = True) -> Self:
        """Read a classifier that `save` or `trident fit` wrote.

        `backbone` must be given if it is an ONNX file, a Python function or weights of your own: a file cannot ask for
        those.
        """
        labeller = load_classifier(
            Path(path), usable_device(device), None if backbone == "auto" else backbone, open_cache(cache)
        )
        made = cls(device=device, backbone=labeller.backbone.name, cache=cache)
        made.classes_, made.labeller_ = np.array(labeller.classes), labeller
        return made

    def _by_features(self) -> FeatureLabeller:
        check_is_fitted(self, "labeller_")
        if not isinstance(self.labeller_, FeatureLabeller):
            raise BadValueError("this needs another backbone than conv4, and no weights: see 'trident backbones'")
        return self.labeller_

    def _labelled(self, images: Any, together: bool) -> Labelled:
        check_is_fitted(self, "labeller_")
        labelled = self.labeller_.label(sources_of(images), together=together)
        if labelled.failures:
            raise UnreadableImageError(next(iter(labelled.failures.values())))
        return labelled
