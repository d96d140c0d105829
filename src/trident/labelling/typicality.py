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
_AT_ONCE = 4096  # pictures compared at once


def typicality(
    labelled: np.ndarray, labels: np.ndarray, pile: np.ndarray, n_classes: int, together: bool = True
) -> np.ndarray | None:
    """Features of unit length (labelled picture, feature), their classes, and features of the pile -> (picture,).

    None if there are too few pictures to judge. Not `together`: each picture is judged as a pile of its own.
    """
    own, of_labelled = _cosines(labelled, labels, pile, n_classes)
    n = len(of_labelled) + (len(own) if together else 1)
    if n < _FEWEST:
        return None
    if together:
        medians = np.median(np.concatenate([own, of_labelled]))
    else:
        ordered = np.sort(of_labelled)
        medians = np.mean([own.clip(ordered[place - 1], ordered[place]) for place in ((n - 1) // 2, n // 2)], 0)
    return np.asarray(own / np.maximum(medians, 1e-6))


def _cosines(labelled: np.ndarray, labels: np.ndarray, pile: np.ndarray, n_classes: int) -> tuple[np.ndarray, ...]:
    """The largest cosine of each picture of the pile, and of the labelled pictures whose class has others. float64."""
    sums = np.zeros((n_classes, labelled.shape[1]), np.float32)
    np.add.at(sums, labels, labelled)
    means = normalised(sums).astype(np.float64)
    # 64 bits, in parts: rounding must not depend on the number of pictures.
    parts = [pile[start : start + _AT_ONCE].astype(np.float64) @ means.T for start in range(0, len(pile), _AT_ONCE)]
    own = np.concatenate([part.max(1) for part in parts]) if parts else np.zeros(0)
    others = sums[labels] - labelled  # of the other labelled pictures of the same class
    several = np.bincount(labels, minlength=n_classes)[labels] > 1
    of_labelled = (labelled[several] * normalised(others[several])).sum(1)
    return own, of_labelled.astype(np.float64)


def normalised(rows: np.ndarray) -> np.ndarray:
    """Vectors (row, feature), scaled to unit length."""
    scaled = np.array(rows)
    normalise_in_place(scaled)
    return scaled


def normalise_in_place(rows: np.ndarray) -> None:
    """Scale vectors to unit length in place, without another array of that size."""
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        part /= np.linalg.norm(part, axis=1, keepdims=True).clip(1e-12)
