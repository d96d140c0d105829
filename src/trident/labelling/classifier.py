"""`TridentClassifier`: trained weights as a scikit-learn classifier."""

from pathlib import Path
from typing import Any, Self

import numpy as np

from trident.data.images import ImageSource, UnreadableImageError
from trident.data.pictures import sources_of
from trident.engines.execution import usable_device
from trident.errors import BadValueError, TridentError
from trident.labelling.labeller import Labeller, label_pile, read_labelled
from trident.learning.checkpoint import load_checkpoint
from trident.weights import weights_for

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
    `fit_predict` and `transduce_proba` classify pictures together, in chunks of up to 100. This is faster and, if all
    classes are about equally frequent, more accurate. The label of a picture then depends on the others in its chunk.
    """

    def __init__(self, weights: str | Path = "auto", device: str = "auto"):
        """`weights`: a name from `trident weights`, a run or a file; auto: by the number of labelled pictures."""
        self.weights = weights
        self.device = device

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
        auto = weights_for(len(sources), len(classes))
        checkpoint = load_checkpoint(auto if self.weights == "auto" else self.weights)
        by_class: dict[str, list[ImageSource]] = {
            str(name): [source for source, label in zip(sources, labels, strict=True) if label == name]
            for name in classes
        }
        backbone = checkpoint.recipe.backbone
        device = usable_device(self.device)
        labelled = read_labelled(by_class, backbone.image_size, backbone.image_channels)
        labeller = Labeller(checkpoint, *labelled, device)
        self.classes_, self.labeller_ = classes, labeller  # set only if nothing failed
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (image, class), each picture classified alone; classes as in `classes_`."""
        return self._probabilities(X, together=False)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable classes, each picture classified alone."""
        best = self.predict_proba(X).argmax(1)  # raises an error if it was not fitted
        return np.asarray(self.classes_[best])

    def transduce_proba(self, X: Any) -> np.ndarray:
        """Probabilities (image, class), all pictures classified together."""
        return self._probabilities(X, together=True)

    def fit_predict(self, images: Any, labels: Any, queries: Any) -> np.ndarray:
        """Fit, then the most probable classes of the queries, classified together."""
        return np.asarray(self.fit(images, labels).classes_[self.transduce_proba(queries).argmax(1)])

    def _probabilities(self, images: Any, together: bool) -> np.ndarray:
        check_is_fitted(self, "labeller_")
        labelled = label_pile(self.labeller_, sources_of(images), together=together)
        if labelled.failures:
            raise UnreadableImageError(next(iter(labelled.failures.values())))
        return labelled.probabilities
