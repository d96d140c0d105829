"""`TridentClassifier`: trained weights with the manners of scikit-learn."""

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
    """Labels pictures by a few labelled ones.

    Images may be paths, PIL images, arrays or tensors (height, width, channel or channel first; uint8, or floating
    point from 0 to 1), in a list or as one array. Their middle square is scaled to the size that the weights take.
    Labels may be anything that can be sorted. Classes may have different numbers of pictures.

    `predict` and `predict_proba` look at each picture alone: what they say of one does not depend on the others.
    `fit_predict` and `transduce_proba` look at a pile together, in chunks of up to 100, which is faster and, where all
    classes are about equally frequent, more accurate; what they say of a picture depends on which others are in its
    chunk.
    """

    def __init__(self, weights: str | Path = "auto", device: str = "auto"):
        """`weights`: a name of `trident weights`, a run or a file; auto: by the number of labelled pictures."""
        self.weights = weights
        self.device = device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array, tags.input_tags.string = False, True, True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Keep the labelled pictures X and their labels y. The network was trained before and is not trained here."""
        if y is None:
            raise BadValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: give one label per picture"
            )
        sources, shape = sources_of(X), np.asarray(y).shape
        if not shape or shape[0] != len(sources):
            raise BadValueError(f"{len(sources)} images came with labels of shape {shape}: one each is needed")
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
        self.classes_, self.labeller_ = classes, labeller  # both or, where something was wrong, neither
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (image, class) of pictures that are each looked at alone; classes as in `classes_`."""
        return self._probabilities(X, together=False)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of pictures that are each looked at alone."""
        best = self.predict_proba(X).argmax(1)  # complains first, if it was not fitted
        return np.asarray(self.classes_[best])

    def transduce_proba(self, X: Any) -> np.ndarray:
        """Probabilities (image, class) of a pile that is looked at together."""
        return self._probabilities(X, together=True)

    def fit_predict(self, images: Any, labels: Any, queries: Any) -> np.ndarray:
        """Fit, then the most probable class of the queries, a pile that is looked at together."""
        return np.asarray(self.fit(images, labels).classes_[self.transduce_proba(queries).argmax(1)])

    def _probabilities(self, images: Any, together: bool) -> np.ndarray:
        check_is_fitted(self, "labeller_")
        labelled = label_pile(self.labeller_, sources_of(images), together=together)
        if labelled.failures:
            raise UnreadableImageError(next(iter(labelled.failures.values())))
        return labelled.probabilities
