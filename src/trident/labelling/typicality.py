"""How typical a picture is of the class it resembles most. Pictures that are not typical belong to none of the classes.

The typicality of a picture is its largest cosine with a class's mean labelled feature, divided by the median of the
same number over the pile and the labelled pictures (each of these against the other labelled pictures of its class).
A picture like most others has about 1. The median supposes that most pictures of the pile belong to the classes.
"""

import numpy as np

# Chosen on CUB's validation classes, DTD and RSSCN7, each with pictures of the others and of other classes of its own
# mixed in: 3 % of the pictures that belong to a class have less. See docs/results.md.
LEAST_TYPICAL = 0.65
_FEWEST = 5  # pictures needed for a median


def typicality(labelled: np.ndarray, labels: np.ndarray, pile: np.ndarray, n_classes: int) -> np.ndarray | None:
    """Features of unit length (labelled picture, feature), their classes, and features of the pile -> (picture,).

    None if there are too few pictures to judge.
    """
    sums = np.zeros((n_classes, labelled.shape[1]), np.float32)
    np.add.at(sums, labels, labelled)
    own = (pile @ unit(sums).T).max(1) if len(pile) else np.zeros(0)
    others = sums[labels] - labelled  # of the other labelled pictures of the same class
    several = np.bincount(labels, minlength=n_classes)[labels] > 1
    of_labelled = (labelled[several] * unit(others[several])).sum(1)
    known = np.concatenate([own, of_labelled])
    if len(known) < _FEWEST:
        return None
    return np.asarray(own / max(float(np.median(known)), 1e-6), np.float64)


def unit(rows: np.ndarray) -> np.ndarray:
    """Vectors (row, feature), scaled to unit length."""
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12))
